-- uses: keys, server
-- Take, keep or let go of a lease that one holder has at a time, such as the right to run a batch.
-- ARGV  1 lease: its name behind the queue's prefix   2 holder, a word of its own
--       3 for how long (ms) it is taken or kept, 0 to let go of it
-- Reply 1 if it is the holder's now, or was until it let go; 0 if it is somebody else's, or nobody's to
--       let go of
-- A lease that ran out is taken again, unless another holder was first. Reading and writing in one step
-- is what keeps two processes from holding one lease.

local key, holder, ttl_ms = keys.prefix .. ARGV[1], ARGV[2], tonumber(ARGV[3])
local held_by = redis.pcall('GET', key)
if type(held_by) == 'table' then held_by = false end -- what a stranger made of it is no holder
server.write_needs_no_memory()
if ttl_ms == 0 then
  if held_by ~= holder then return 0 end
  redis.call('DEL', key)
  return 1
end
if held_by and held_by ~= holder then return 0 end
redis.call('SET', key, holder, 'PX', ttl_ms)
return 1
