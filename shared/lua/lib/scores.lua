-- uses: keys, numbers, server
-- The score of a request, which is its place in its queue. Lower scores run first.

-- How much one level of priority changes a score (ms). With aging, a request overtakes only those that came
-- at most this much earlier. With strict priority, a level is larger than any time.
function scores.priority_level()
  return server.config('strict_priority') == '1' and 2199023255552 or server.number('aging_ms', 60000)
end

-- How long before its deadline a request by deadline counts as one that has just arrived (ms).
local MARGIN_MS = 600000

-- The score of a request of this priority that arrives now. With a deadline, the score of one that arrives shortly
-- before it: so the earliest deadline comes first, behind all that arrive until then, and none waits for ever.
function scores.at_arrival(priority, deadline_ms)
  return server.now + math.max(0, (deadline_ms or 0) - MARGIN_MS) + priority * scores.priority_level()
end

-- A stored score as text, or that of the end of the queue if a stranger wrote something else.
function scores.read(stored)
  local number = tonumber(stored or nil)
  if not number or number ~= number then number = server.now end
  return numbers.precise(number)
end

local MOST_OVERTAKING = 32 -- requests that may overtake a request, for each live worker

-- How many requests may overtake one because of affinity. With more workers, they pass as quickly.
local num_workers
function scores.most_overtaking()
  num_workers = num_workers or math.max(1, server.size(keys.prefix .. 'workers'))
  return MOST_OVERTAKING * num_workers
end
