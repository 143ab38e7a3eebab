-- Give a waiting request another priority: its place becomes what it would be, had it come with it.
-- KEYS  1 pending
-- ARGV  1 id   2 priority
--       3 the payload as the caller read it   4 that payload with the new priority
-- Reply changed; active (a worker holds it, it stays as it is), finished, unknown (it waits nowhere),
--       stale (the payload is another one by now: read it again)

local id, priority = ARGV[1], tonumber(ARGV[2])
local fields = read_request(id, 'state', 'payload', 'priority', 'score', 'tenant')
if not fields or not fields.payload then return 'unknown' end
if is_final(fields.state) then return 'finished' end
if redis.call('ZSCORE', leases, id) then return 'active' end
local queue = queue_of(id, fields.tenant)
if not queue and not score_in(delayed, id) then return 'unknown' end
if fields.payload ~= ARGV[3] then return 'stale' end

local before = whole(fields.priority) or number_in(fields.payload, 'priority') or 0
local score = tonumber(place(queue and redis.call('ZSCORE', queue, id) or fields.score))
local text = string.format('%.17g', score + (priority - before) * priority_level())
write_needs_memory()
redis.call('HSET', request_key(id), 'payload', ARGV[4], 'priority', exact(priority), 'score', text)
if queue then redis.call('ZADD', queue, text, id) end
wake_workers()
return 'changed'
