-- Tell that a worker lives and how it fares; forget those that have not told for long.
-- KEYS  1 pending
-- ARGV  1 worker id   2 time until it counts as gone (ms); 0: it leaves now   then field, value, ...
-- Reply how many workers live

local workers, worker, ttl = prefix .. 'workers', ARGV[1], tonumber(ARGV[2])
local key = prefix .. 'worker:' .. worker
write_needs_no_memory()
if ttl > 0 then
  redis.call('HSET', key, 'heartbeat_at', exact(now), unpack(ARGV, 3))
  redis.call('PEXPIRE', key, ttl)
  redis.call('ZADD', workers, exact(now + ttl), worker)
else
  redis.call('DEL', key)
  redis.call('ZREM', workers, worker)
end
redis.call('ZREMRANGEBYSCORE', workers, '-inf', '(' .. exact(now))
return redis.call('ZCARD', workers)
