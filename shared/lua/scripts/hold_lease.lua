-- uses: keys, server
-- Take, keep or let go of a lease that one holder has at a time, such as the right to run a batch.
-- ARGV  1 lease: its key without the queue's prefix   2 holder: a unique word
--       3 for how long (ms) it is taken or kept, 0 to let go of it
-- Reply 1 if the holder has the lease now, or had it until it let go; 0 if another holder has it, or nobody
--       had it to let go of
-- A holder can take its lease again after it ran out, unless another holder was first. The script reads and
-- writes in one step, so two processes never hold one lease.

local key, holder, ttl_ms = keys.prefix .. ARGV[1], ARGV[2], tonumber(ARGV[3])
local LONGEST_MS = 3600000 -- of a lease; a stranger wrote one that lasts longer, or for ever
local held_by, left_ms = redis.pcall('GET', key), redis.call('PTTL', key)
if type(held_by) == 'table' then held_by = false end -- a stranger gave the key another type
if left_ms < 0 or left_ms > LONGEST_MS then held_by = false end
server.write_needs_no_memory()
if ttl_ms == 0 then
  if held_by ~= holder then return 0 end
  redis.call('DEL', key)
  return 1
end
if held_by and held_by ~= holder then return 0 end
redis.call('SET', key, holder, 'PX', ttl_ms)
return 1
