-- uses: numbers, server, scores, ending, work
-- Moves a request within its priority by its expected output. A request is only overtaken by requests that arrive
-- within twice the setting, so none waits for ever.

local LONGEST_MS = 86400000
local LONGEST = 2 -- in parts of the mean; longer requests count as this long

local most, mean, trust -- each computed at most once a call

-- The most that a request moves. The longest and the shortest request that arrive together at neighbouring priorities
-- must not change their order.
local function most_ms()
  if not most then
    most = math.min(server.number('shortest_first_ms', 0), scores.priority_level() / 2, LONGEST_MS)
  end
  return most
end

local function mean_tokens()
  mean = mean or work.tokens_of_answer()
  return mean
end

-- How well the clients' guesses have predicted outputs: 0 if not, as long as too few requests have finished, too. This
-- is their correlation, less what chance explains (two standard errors).
local function measure_trust()
  if trust then return trust end
  local guesses, x, y, xx, yy, xy = ending.read_guesses(), 0, 0, 0, 0, 0
  local num, longest = #guesses, math.floor(LONGEST * mean_tokens())
  trust = 0
  for _, guess in ipairs(guesses) do
    local expected, actual = math.min(longest, guess[1]), math.min(longest, guess[2])
    x, y, xy = x + expected, y + actual, xy + expected * actual
    xx, yy = xx + expected * expected, yy + actual * actual
  end
  local spread = (num * xx - x * x) * (num * yy - y * y)
  if spread <= 0 then return trust end
  local correlation = (num * xy - x * y) / math.sqrt(spread)
  trust = math.max(0, math.min(1, (correlation - 2 / math.sqrt(num)) / 0.3))
  return trust
end

-- The client's guess of a request's output, at most its max_tokens; nil if unknown, or if the queue does not need it.
function shortest_first.guess(expected_tokens, max_output)
  local guess = most_ms() > 0 and numbers.whole(expected_tokens)
  return guess and math.max(0, math.min(guess, max_output or guess))
end

-- The expected output of a request with a guess, if that of a request without a guess is `otherwise`.
function shortest_first.expected_output(guess, otherwise)
  return otherwise + measure_trust() * (guess - otherwise)
end

-- How much later (ms) a request comes, or sooner if negative, than one as long as the mean of the last answers.
-- A request of unknown length counts as one of the mean, so such requests keep their order of arrival.
local function shift_ms(guess, max_output)
  if most_ms() <= 0 then return 0 end
  local expected = mean_tokens()
  if guess then expected = shortest_first.expected_output(guess, expected) end
  local tokens = math.max(0, math.min(expected, max_output or expected))
  return most_ms() * (math.min(LONGEST, tokens / mean) - 1)
end

-- The score of a request of this priority that arrives now. The expected output does not matter if the queue orders
-- requests like this one by deadline.
function shortest_first.at_arrival(priority, deadline_ms, guess, max_output)
  local shift = deadline_ms > 0 and 0 or shift_ms(guess, max_output)
  return scores.at_arrival(priority, deadline_ms) + shift
end

-- Lengths of the last answers, shortest first. As far as guesses are trusted, these are the lengths that this guess
-- meant for the last guessed answers: the guess times an answer's real length by its guess.
function shortest_first.lengths(guess)
  local lengths, guessed = {}, {}
  for nth, output in ipairs(ending.read_outputs()) do lengths[nth] = output[2] end
  table.sort(lengths)
  if not guess or measure_trust() == 0 then return lengths end
  for nth, each in ipairs(ending.read_guesses()) do guessed[nth] = guess * each[2] / math.max(1, each[1]) end
  table.sort(guessed)
  for nth, length in ipairs(lengths) do
    local expected = guessed[math.ceil((nth - 0.5) * #guessed / #lengths)]
    lengths[nth] = shortest_first.expected_output(expected, length)
  end
  return lengths
end
