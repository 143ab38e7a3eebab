-- Delete dead letters and all that is kept of them.
-- KEYS  1 pending
-- ARGV  ids
-- Reply a status for each: purged, unknown (no such dead letter)

local statuses = {}
write_needs_no_memory()
for n, id in ipairs(ARGV) do statuses[n] = purge(id) and 'purged' or 'unknown' end
carry_out()
return statuses
