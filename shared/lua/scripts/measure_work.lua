-- uses: keys, numbers, server, pending, requests, ending, work, shortest_first
-- Measure how much work there is, and what a worker does in a second, for autoscaling and model swapping.
-- Changes nothing.
-- ARGV  1 how far ahead delayed requests count (ms)   2 how many deadlines to return, the nearest first
-- Reply {waiting, held by workers, the most that ran at once in the last minute, delayed and due soon, age of
--        the oldest that waits (ms), workers that claim, how many requests these take at once, output tokens of
--        an answer, output tokens that one worker makes in a second while requests wait (0: not measured),
--        output tokens asked for in a second, expected output tokens of all that wait, 1 if the queue is
--        paused, the lowest score of those that wait (empty: none), time until the deadline of a request (ms),
--        ...}. Numbers with a fraction are text.

local MAX_LOOKED_AT = 200 -- requests
local MAX_AGE_MS = 30 * 86400000 -- a score that is older is no time

local mean, longest = work.tokens_of_answer(), nil

-- The expected output of a request. No guess counts as more than the longest of the last answers.
local function expected_output(expected_tokens)
  if not longest then
    longest = 0
    for _, output in ipairs(ending.read_outputs()) do longest = math.max(longest, output[2]) end
  end
  local guess = shortest_first.guess(expected_tokens, longest)
  return guess and shortest_first.expected_output(guess, mean) or mean
end

local queues, num_waiting, tokens_waiting, front, oldest = pending.queues(), 0, 0, math.huge, server.now
local last = math.max(1, math.floor(MAX_LOOKED_AT / #queues)) - 1
for _, key in ipairs(queues) do
  local size, first, more = redis.call('ZCARD', key), redis.call('ZRANGE', key, 0, last, 'WITHSCORES'), 0
  for nth = 1, #first, 2 do
    local fields = requests.read(first[nth], 'enqueued_at', 'expected_tokens') or {}
    -- Requests from plain commands have no time but in their score.
    local at = numbers.whole(fields.enqueued_at) or tonumber(first[nth + 1]) or server.now
    if at > server.now - MAX_AGE_MS then oldest = math.min(oldest, at) end
    if fields.expected_tokens then more = more + expected_output(fields.expected_tokens) - mean end
  end
  num_waiting = num_waiting + size
  tokens_waiting = tokens_waiting + (mean + more / math.max(1, #first / 2)) * size
  front = math.min(front, tonumber(first[2]) or math.huge)
end
local workers = work.count_workers()
local soon = server.due(keys.delayed, numbers.exact(server.now + tonumber(ARGV[1])), MAX_LOOKED_AT)
local num_active = server.size(keys.leases)
local reply = {
  num_waiting, num_active, work.most_running(), #soon, math.floor(server.now - oldest), workers.claiming,
  workers.places, numbers.precise(mean), numbers.precise(work.tokens_of_worker()),
  numbers.precise(work.tokens_requested(num_waiting, num_active)), numbers.precise(tokens_waiting),
  server.config('paused') == '1' and 1 or 0,
  front < math.huge and numbers.precise(front) or '',
}
local nearest = redis.pcall('ZRANGE', keys.deadlines, server.now_text, '+inf', 'BYSCORE', 'LIMIT', 0,
  tonumber(ARGV[2]), 'WITHSCORES')
for nth = 2, nearest.err and 0 or #nearest, 2 do
  reply[#reply + 1] = math.min(2 ^ 53, tonumber(nearest[nth]) - server.now)
end
return reply
