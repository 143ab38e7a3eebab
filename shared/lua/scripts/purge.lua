-- uses: server, requests
-- Delete dead letters and all that is kept of them.
-- ARGV  ids
-- Reply a status for each: purged, unknown (no such dead letter)

local statuses = {}
server.write_needs_no_memory()
for n, id in ipairs(ARGV) do statuses[n] = requests.purge(id) and 'purged' or 'unknown' end
server.carry_out()
return statuses
