-- Delete dead letters and all that is kept of them.
-- KEYS  1 pending
-- ARGV  ids
-- Reply a status for each: purged, unknown (no such dead letter)

local statuses = {}
write_needs_no_memory()
for n, id in ipairs(ARGV) do
  if redis.call('ZREM', prefix .. 'dead', id) == 1 then
    -- A stranger may have put it into a queue again.
    drop_holds(id, (read_request(id, 'tenant') or {}).tenant)
    redis.call('DEL', request_key(id), tokens_key(id))
    statuses[n] = 'purged'
  else
    statuses[n] = 'unknown'
  end
end
carry_out()
return statuses
