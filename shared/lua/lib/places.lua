-- uses: keys, numbers, server, scores, shortest_first, work
-- How many requests run before one that waits, and the times of its start and its end.

local NORMAL_P95 = 1.645 -- quantile of the standard normal distribution
local NORMALS = {-1.593, -0.967, -0.589, -0.282, 0, 0.282, 0.589, 0.967, 1.593} -- nine that stand for all
local MINUTE_MS = 60000
local MOST_VARIANCE = 2 -- relative variance of a start; a larger one says nothing more
local DRIFT = 0.04 -- relative variance of the rate of ends in the next minute, as in simulated worlds
local NUM_LENGTHS, NUM_TIMES = 21, 31 -- how many stand for all
local NUM_PRIOR = 2 -- how many answers count as long as they may be
local SLOWER = 2 -- a full worker may take this many times as long for a token as it did before it was full

local function count(key, highest_score, lowest_score)
  local num = redis.pcall('ZCOUNT', key, lowest_score or '-inf', highest_score)
  return type(num) == 'number' and num or 0
end

local function has_other_tenants(tenant)
  local names = redis.pcall('SRANDMEMBER', keys.tenants_waiting, 3) -- at most '', its own and another one
  for _, name in ipairs(names.err and {} or names) do
    if name ~= '' and name ~= tenant then return true end
  end
  return tenant ~= '' and server.size(keys.pending) > 0
end

local workers -- as counted by `all_workers`, which reads a hash of each worker, so only if this is needed
local function all_workers()
  workers = workers or work.count_workers()
  return workers
end

-- Sets how many requests end in a millisecond while requests wait, `done.ends_per_ms`, and the relative `done.variance`
-- of that rate. The rate is a guess if none ended in the last minute, or if none waited, so that workers may be faster
-- than they were. The guess comes from the last answers and, as a prior, some answers of `most_tokens`. If workers were
-- never full, the guess is that full workers are about as fast as they were; 0 if they report no speed.
local function guess_ends(done, most_tokens)
  local lately, num = work.tokens_of_answer()
  most_tokens = math.max(lately, most_tokens)
  local unended = done.num == 0 and done.tokens or 0
  local each = math.min(most_tokens, (num * lately + NUM_PRIOR * most_tokens + unended) / (num + NUM_PRIOR))
  done.variance, done.ends_per_ms = 0, 0
  if done.num == 0 or not done.were_full then done.variance = (each / lately - 1) ^ 2 end
  -- Many long answers may have begun at the same time, so that none ends for long.
  done.num = math.max(done.num, done.tokens / (done.num == 0 and each or most_tokens))
  if not done.were_full then
    local workers = all_workers()
    local tokens_per_ms = work.tokens_of_worker() * workers.claiming / 1000
    if tokens_per_ms == 0 then
      tokens_per_ms = workers.ends_per_ms * lately
      if tokens_per_ms == 0 then return end
      local ms_of_token = workers.places / tokens_per_ms
      done.ms_of_token = {ms_of_token, SLOWER * ms_of_token}
      done.variance = done.variance + (SLOWER - 1) ^ 2
    end
    done.ends_per_ms = tokens_per_ms / each
  end
  done.ends_per_ms = math.max(done.ends_per_ms, done.num / done.ms)
end

-- The time (ms) until `num` requests have ended. `normal` is the quantile of the standard normal distribution. The time
-- has about a lognormal distribution. Its relative variance has four parts: of the requests to come, of the measured
-- rate, of the guess of their lengths, and if the time is long, of the rate until then.
local function ms_until_ended(num, done, normal)
  if num <= 0 then return 0 end
  local median = num / done.ends_per_ms
  local variance = done.variance + done.dispersion * (1 / num + 1 / done.num) + DRIFT * math.min(1, median / MINUTE_MS)
  return median * math.exp(normal * math.sqrt(math.log(1 + math.min(MOST_VARIANCE, variance))))
end

-- Sorts values, and returns `num` of them that stand for all.
local function spread(values, num)
  table.sort(values)
  local chosen = {}
  num = math.min(num, #values)
  for nth = 1, num do chosen[nth] = values[math.ceil((nth - 0.5) * #values / num)] end
  return chosen
end

-- Times (ms) that stand for how long workers hold a request with at most `max_output` tokens: how long it waits in its
-- worker (Little, 1961), and then the time of its output. Lengths are those of the last finished requests and, as a
-- prior, `max_output`; a guess moves them. Speeds are those of the last minute, in any combination.
local function ms_held(done, max_output, guess)
  local lengths, times = shortest_first.lengths(guess), {}
  for _ = 1, max_output < math.huge and NUM_PRIOR or 0 do lengths[#lengths + 1] = max_output end
  local in_worker = math.max(0, done.active - done.running) * done.ms / done.num
  for _, length in ipairs(spread(lengths, NUM_LENGTHS)) do
    local tokens = math.max(1, math.min(length, max_output))
    for _, ms_of_token in ipairs(done.ms_of_token) do times[#times + 1] = in_worker + tokens * ms_of_token end
  end
  return spread(times, NUM_TIMES)
end

-- Times (ms) that stand for all times until the end of a request that starts after `num_ends` ends, shortest first.
local function ms_until_end(num_ends, done, held)
  if num_ends <= 0 then return held end
  local times = {}
  for _, normal in ipairs(NORMALS) do
    local start = ms_until_ended(num_ends, done, normal)
    for _, ms in ipairs(held) do times[#times + 1] = start + ms end
  end
  table.sort(times)
  return times
end

-- How many more requests the workers would take at once.
local function room(done)
  local workers = all_workers()
  local capacity = done.most_active > 0 and done.most_active * workers.claiming or workers.places
  return math.max(0, math.floor(capacity) - server.size(keys.leases))
end

-- The place of a request as the values of the script `place`'s reply. Its fields: `tenant`; `num_in_front`, in the
-- queue of its tenant (nil: unknown); `delay_ms`; `is_due`, if its delay has passed; and if it does not wait yet,
-- `max_output`, the most tokens of its output, and `guess`, the expected ones (nil: unknown).
function places.of(request)
  local tenant, num_in_front, delay_ms = request.tenant, request.num_in_front, request.delay_ms
  -- A claim ends what is past its deadline, and first brings delayed requests to their places.
  local num_due = count(keys.delayed, server.now_text) - (request.is_due and 1 or 0)
  local is_most = delay_ms > 0 or request.is_due or count(keys.deadlines, server.now_text) > 0

  local counts = redis.pcall('HMGET', keys.backlog, 'waiting', 'tokens:' .. tenant, 'delayed:' .. tenant)
  if counts.err then counts = {} end
  for nth = 1, 3 do counts[nth] = numbers.whole(counts[nth], 0) end
  local num_of_tenant = server.size(keys.pending_of(tenant))
  local num_counted = num_of_tenant + counts[3]
  local tokens_of_each = counts[2] > 0 and num_counted > 0 and counts[2] / num_counted

  -- Among tenants, a claim decides by the service that each has received by then, so all requests of the others may
  -- run first. By its share, the tenant gets every n-th turn.
  local num_expected, num_behind = num_in_front, math.max(0, num_of_tenant - (num_in_front or 0) - 1)
  if num_in_front and has_other_tenants(tenant) then
    num_expected = (num_in_front + 0.5) * work.share_of(tenant) - 0.5
    local num_of_others = counts[1]
    if tenant ~= '' then num_of_others = math.max(0, counts[1] - num_of_tenant) + server.size(keys.pending) end
    num_in_front, is_most = num_in_front + num_of_others, true
  end
  if num_in_front and server.number('affinity_ms', 0) > 0 then
    num_in_front, is_most = num_in_front + math.min(num_behind, scores.most_overtaking()), true
  end
  if num_in_front and num_due > 0 then num_in_front, is_most = num_in_front + num_due, true end
  num_expected = math.min(num_expected or 0, num_in_front or 0)

  local live = count(keys.prefix .. 'workers', '+inf', server.now_text)
  local paused, done = server.config('paused') == '1', work.done_lately()
  guess_ends(done, tokens_of_each or 0)
  local reply = {
    'waiting', num_in_front or '', is_most and 1 or 0, numbers.precise(num_expected),
    tokens_of_each and numbers.precise(tokens_of_each) or '', delay_ms, live,
    paused and 1 or 0, numbers.precise(done.num), numbers.precise(done.dispersion), numbers.precise(done.tokens),
    done.ms, '', '', '', '',
  }
  if not num_in_front or paused or live == 0 or done.num == 0 or done.ends_per_ms == 0 then return reply end
  -- The request starts when those in front have started and one more request has ended, unless there is room.
  local num_free = request.max_output and room(done) or 0
  local expected, most = num_expected + 1 - num_free, num_in_front + 1 - num_free
  local function after_delay(ms) return numbers.exact(math.ceil(delay_ms + ms)) end
  reply[13] = after_delay(ms_until_ended(expected, done, 0))
  reply[14] = after_delay(ms_until_ended(most, done, NORMAL_P95))
  local held = request.max_output and ms_held(done, request.max_output, request.guess) or {}
  if #held > 0 then
    local ends = ms_until_end(expected, done, held)
    reply[15] = after_delay(ends[math.ceil(0.5 * #ends)])
    if most > expected then ends = ms_until_end(most, done, held) end
    reply[16] = after_delay(ends[math.ceil(0.95 * #ends)])
  end
  return reply
end

-- The place of a request that would be enqueued now, after `num_before` others of the same call. `score` is text.
function places.before_arrival(tenant, score, num_before, delay_ms, max_output, guess)
  local num_in_front = count(keys.pending_of(tenant), score) + num_before
  return places.of({
    tenant = tenant, num_in_front = num_in_front, delay_ms = delay_ms, max_output = max_output, guess = guess,
  })
end
