-- uses: keys, numbers, server, requests, scores, pending
-- Give a waiting request another priority, and the place that it would have had with it from the start.
-- ARGV  1 id   2 priority
--       3 the payload as the caller read it   4 that payload with the new priority
-- Reply changed; active (a worker holds it, it stays as it is), finished, unknown (it waits nowhere),
--       stale (the payload has changed: read it again)

local id, priority = ARGV[1], tonumber(ARGV[2])
local fields = requests.read(id, 'state', 'payload', 'priority', 'score', 'tenant')
if not fields or not fields.payload then return 'unknown' end
if requests.is_final(fields.state) then return 'finished' end
if redis.call('ZSCORE', keys.leases, id) then return 'active' end
local queue = pending.queue_of(id, fields.tenant)
if not queue and not server.score_in(keys.delayed, id) then return 'unknown' end
if fields.payload ~= ARGV[3] then return 'stale' end

local before = numbers.whole(fields.priority) or numbers.in_json(fields.payload, 'priority') or 0
local score = tonumber(scores.read(queue and redis.call('ZSCORE', queue, id) or fields.score))
local text = numbers.precise(score + (priority - before) * scores.priority_level())
server.write_needs_no_memory()
redis.call('HSET', keys.request(id), 'payload', ARGV[4], 'priority', numbers.exact(priority), 'score', text)
if queue then redis.call('ZADD', queue, text, id) end
server.wake_workers()
return 'changed'
