-- Tidy up behind whoever is gone: leases that ran out, deadlines that passed, delays that are over.
-- KEYS  1 pending
-- ARGV  1 max crashes: so many lost leases make a request a dead letter   2 limit a call
-- Reply {requests back to waiting, ended, dead}

local max_crashes, limit = tonumber(ARGV[1]), tonumber(ARGV[2])
local returned, ended, dead = promote_delayed(), 0, 0

local function bury(id, crashes)
  finish_bare(id, 'error', 'dead_letter', string.format(
    'the request was aboard at %d crashes of workers and is not tried again', crashes))
  redis.call('HSET', request_key(id), 'state', 'dead')
  redis.call('PERSIST', request_key(id))
  redis.call('ZADD', prefix .. 'dead', now_text, id)
end

for _, id in ipairs(redis.call('ZRANGE', leases, '-inf', now_text, 'BYSCORE', 'LIMIT', 0, limit)) do
  local fields = read_request(id, 'state', 'payload', 'cancelled', 'score', 'crashes')
  if not fields or not (fields.state or fields.payload) then
    finish_bare(id, 'error', 'invalid_request', 'request: its hash was deleted while it ran')
    ended = ended + 1
  elseif is_final(fields.state) then
    redis.call('ZREM', leases, id)
  else
    local crashes = whole(fields.crashes, 0) + 1
    redis.call('HSET', request_key(id), 'crashes', crashes)
    if fields.cancelled == '1' then
      finish_bare(id, 'cancelled')
      ended = ended + 1
    elseif crashes >= max_crashes then
      bury(id, crashes)
      dead = dead + 1
    else
      back_to_waiting(id, fields.score)
      returned = returned + 1
    end
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
