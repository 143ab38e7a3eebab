-- uses: keys, numbers, server
-- Report that a worker lives, with its statistics. Remove workers that have not reported for long.
-- ARGV  1 worker id   2 time until it counts as gone (ms); 0: it leaves now   then field, value, ...
--       the field `slots`, its batch as JSON, goes into the hash `slots:WID` instead of `worker:WID`; if the
--       field `overflow` is True, the worker is listed with the overflow workers, apart from the others;
--       with a field `changes`, the others are those that changed since the last report
-- Reply how many workers of its kind live; -1, with `changes`, if there is no last report

local workers, worker, ttl = keys.prefix .. 'workers', ARGV[1], tonumber(ARGV[2])
local key, slots_key = keys.prefix .. 'worker:' .. worker, keys.prefix .. 'slots:' .. worker
local fields, slots, only_changes = {}, nil, false
for at = 3, #ARGV, 2 do
  if ARGV[at] == 'slots' then
    slots = ARGV[at + 1]
  elseif ARGV[at] == 'changes' then
    only_changes = true
  else
    if ARGV[at] == 'overflow' and ARGV[at + 1] == 'True' then workers = keys.prefix .. 'workers:overflow' end
    fields[#fields + 1] = ARGV[at]
    fields[#fields + 1] = ARGV[at + 1]
  end
end
server.write_needs_no_memory()
server.reset_if_not('hash', key)
server.reset_if_not('hash', slots_key)
server.reset_if_not('zset', workers)
if only_changes and redis.call('EXISTS', key) == 0 then return -1 end
if ttl > 0 then
  redis.call('HSET', key, 'heartbeat_at', server.now_text, unpack(fields))
  redis.call('PEXPIRE', key, ttl)
  redis.call('ZADD', workers, numbers.exact(server.now + ttl), worker)
  if slots then
    redis.call('HSET', slots_key, 'told_at', server.now_text, 'slots', slots)
    redis.call('PEXPIRE', slots_key, ttl)
  end
else
  redis.call('DEL', key, slots_key)
  redis.call('ZREM', workers, worker)
end
redis.call('ZREMRANGEBYSCORE', workers, '-inf', '(' .. server.now_text)
return redis.call('ZCARD', workers)
