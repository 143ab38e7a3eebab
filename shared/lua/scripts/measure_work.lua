-- uses: keys, numbers, server, pending, requests, work
-- Measure how much work there is, and what a worker does in a second, for autoscaling and model swapping.
-- Changes nothing.
-- ARGV  1 how far ahead delayed requests count (ms)   2 how many deadlines to return, the nearest first
-- Reply {waiting, held by workers, the most that ran at once in the last minute, delayed and due soon, age of
--        the oldest that waits (ms), workers that claim, how many requests these take at once, output tokens of
--        an answer, output tokens that one worker makes in a second while requests wait (0: not measured),
--        output tokens asked for in a second, 1 if the queue is paused, the lowest score of those that wait
--        (empty: none), time until the deadline of a request (ms), ...}. Numbers with a fraction are text.

local MAX_LOOKED_AT = 200 -- requests
local MAX_AGE_MS = 30 * 86400000 -- a score that is older is no time

-- Requests from plain commands have no time but in their score.
local function oldest_age(queues)
  local oldest, each = server.now, math.max(1, math.floor(MAX_LOOKED_AT / #queues))
  for _, key in ipairs(queues) do
    local found = redis.call('ZRANGE', key, 0, each - 1, 'WITHSCORES')
    for nth = 1, #found, 2 do
      local fields = requests.read(found[nth], 'enqueued_at') or {}
      local at = numbers.whole(fields.enqueued_at) or tonumber(found[nth + 1]) or server.now
      if at > server.now - MAX_AGE_MS then oldest = math.min(oldest, at) end
    end
  end
  return math.floor(server.now - oldest)
end

local queues, num_waiting, front = pending.queues(), 0, math.huge
for _, key in ipairs(queues) do
  num_waiting = num_waiting + redis.call('ZCARD', key)
  front = math.min(front, tonumber(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2]) or math.huge)
end
local workers = work.count_workers()
local soon = server.due(keys.delayed, numbers.exact(server.now + tonumber(ARGV[1])), MAX_LOOKED_AT)
local num_active = server.size(keys.leases)
local reply = {
  num_waiting, num_active, work.most_running(), #soon, oldest_age(queues), workers.claiming,
  workers.places, numbers.precise(work.tokens_of_answer()), numbers.precise(work.tokens_of_worker()),
  numbers.precise(work.tokens_requested(num_waiting, num_active)), server.config('paused') == '1' and 1 or 0,
  front < math.huge and numbers.precise(front) or '',
}
local nearest = redis.pcall('ZRANGE', keys.deadlines, server.now_text, '+inf', 'BYSCORE', 'LIMIT', 0,
  tonumber(ARGV[2]), 'WITHSCORES')
for nth = 2, nearest.err and 0 or #nearest, 2 do
  reply[#reply + 1] = math.min(2 ^ 53, tonumber(nearest[nth]) - server.now)
end
return reply
