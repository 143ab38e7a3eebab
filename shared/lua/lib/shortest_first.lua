-- uses: numbers, server, requests, scores, work
-- Moves a request within its priority by its expected output. A request is only overtaken by requests that arrive
-- within twice the setting, so none waits for ever.

server.load_config('strict_priority', 'aging_ms', 'shortest_first_ms')

local LONGEST_MS = 86400000

-- The longest and the shortest request that arrive together at neighbouring priorities must not change their order.
local most_ms = math.min(server.number('shortest_first_ms', 0), scores.priority_level() / 2, LONGEST_MS)
local mean

-- How much later (ms) a request comes, or sooner if negative, than one as long as the mean of the last answers.
-- A request of unknown length counts as one of the mean, so such requests keep their order of arrival.
function shortest_first.shift_ms(payload, expected_tokens)
  if most_ms <= 0 then return 0 end
  mean = mean or work.tokens_of_answer()
  local expected = numbers.whole(expected_tokens, mean)
  local tokens = math.min(expected, requests.requested_output(payload) or expected)
  return most_ms * math.max(-1, math.min(1, tokens / mean - 1))
end
