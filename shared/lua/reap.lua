-- Tidy up behind whoever is gone: leases that ran out, deadlines that passed, delays that are over.
-- KEYS  1 pending
-- ARGV  1 max crashes: so many lost leases, the last of them while it ran alone, make a request a
--         dead letter   2 limit a call
-- Reply {requests back to waiting, ended, dead}

local max_crashes, limit = tonumber(ARGV[1]), tonumber(ARGV[2])
write_needs_no_memory()
local returned, ended, dead = promote_delayed(), 0, 0

for _, id in ipairs(redis.call('ZRANGE', leases, '-inf', now_text, 'BYSCORE', 'LIMIT', 0, limit)) do
  local fields = read_request(id, 'state', 'payload', 'cancelled', 'score')
  if not fields or not (fields.state or fields.payload) then
    finish_bare(id, 'error', 'invalid_request', 'request: its hash was deleted while it ran')
    ended = ended + 1
  elseif is_final(fields.state) then
    redis.call('ZREM', leases, id)
  elseif fields.cancelled == '1' then
    finish_bare(id, 'cancelled')
    ended = ended + 1
  elseif not may_live(id, max_crashes) then
    if count_crash(id, fields.score, max_crashes) == 'dead' then dead = dead + 1
    else returned = returned + 1 end
  end
end
carry_out() -- what has just ended has no deadline any more
for id in pairs(past_deadline()) do
  if not redis.call('ZSCORE', leases, id) then -- who holds it ends it
    finish_bare(id, 'expired')
    ended = ended + 1
  end
end
carry_out()
if returned > 0 then wake_workers() end
return {returned, ended, dead}
