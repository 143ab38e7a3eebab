-- uses: keys, numbers, server, tenants, requests, ending
-- Measures work and how long it takes: for autoscaling, model swapping and the limits of `enqueue`. Work is
-- counted in output tokens, which assumes that prompts take the same part of a worker's time as in the samples.

local STREAM = keys.prefix .. 'statistics'
local SAMPLE_MS = 5000 -- how long an entry of the statistics stands for
work.SAMPLE_MS = SAMPLE_MS
local WINDOW_MS, RECENT_MS = 30000, 60000
local WEIGHT_OF_NEW = 0.3
local MAX_OUTPUT, MAX_PLACES, MAX_WAIT_MS = 2 ^ 31, 2 ^ 20, 86400000
local MAX_TENANTS = 64 -- whose weights one call reads

-- A field of a sample as a number that is 0, or neither tiny nor huge. A stranger may have written it.
local function measured(value)
  local number = tonumber(value)
  return number and number >= 0.01 and number < 2 ^ 53 and number or 0
end

-- The samples since a time, the newest first; with `at`, the time of the sample's beginning.
local function samples_since(ms)
  local entries, found = redis.pcall('XREVRANGE', STREAM, '+', numbers.exact(math.max(0, ms)), 'COUNT', 20), {}
  for _, entry in ipairs(entries.err and {} or entries) do
    local fields = {}
    for nth = 1, #entry[2], 2 do fields[entry[2][nth]] = entry[2][nth + 1] end
    fields.at = measured(string.match(entry[1], '^%d+'))
    found[#found + 1] = fields
  end
  return found
end

local recent -- read at most once a call
local function recent_samples()
  recent = recent or samples_since(server.now - RECENT_MS)
  return recent
end

-- The mean length of the last answers, and how many they are.
function work.tokens_of_answer()
  local outputs, sum = ending.read_outputs(), 0
  for _, output in ipairs(outputs) do sum = sum + math.min(output[2], MAX_OUTPUT) end
  return #outputs > 0 and math.max(1, sum / #outputs) or requests.DEFAULT_OUTPUT, #outputs
end

-- Output tokens per second of one worker while requests wait; 0 if not measured yet. The newest entries may lack
-- this number, because workers of an earlier release wrote them.
function work.tokens_of_worker()
  for _, sample in ipairs(samples_since(0)) do
    if sample.worker_tokens_per_second then return measured(sample.worker_tokens_per_second) end
  end
  return 0
end

-- The new `tokens_of_worker` for a sample that is about to be written. `claiming` workers claim at its end. If
-- requests waited and ran during the whole sample, the workers generated as fast as they can. Otherwise they could
-- have been faster, so only a higher rate than before counts.
function work.tokens_of_worker_after(sample, claiming, still_waiting)
  local before, claimed = work.tokens_of_worker(), measured(sample.claiming or sample.workers)
  local num_workers = math.max(claimed, claiming) -- those that came meanwhile may have added tokens
  local now = num_workers > 0 and measured(sample.generated_tokens) / (SAMPLE_MS / 1000) / num_workers or 0
  local had_work = measured(sample.waiting) > 0 and measured(sample.active) > 0 and still_waiting
  local were_full = had_work and claimed == claiming and now > 0 and server.config('paused') ~= '1'
    and server.now - measured(sample.bucket) < 2 * SAMPLE_MS
  if before == 0 then return were_full and now or 0 end
  if now > before then return now end
  return were_full and before + WEIGHT_OF_NEW * (now - before) or before
end

-- Returns the numbers of live workers and of the requests that they run. Also returns the number of workers that
-- claim (not those that drain or miss their inference server), and how many requests these take at once. `ends_per_ms`
-- is how many of their mean requests these would end in a millisecond with all places taken; 0 if they ended none.
function work.count_workers()
  local alive = redis.pcall('ZRANGE', keys.prefix .. 'workers', server.now_text, '+inf', 'BYSCORE')
  if alive.err then alive = {} end
  local counts = {alive = #alive, running = 0, claiming = 0, places = 0, ends_per_ms = 0}
  for _, worker in ipairs(alive) do
    local stats = redis.pcall('HMGET', keys.prefix .. 'worker:' .. worker, 'state', 'max_num_seqs', 'num_running',
      'mean_prompt_ms', 'mean_generation_ms')
    if stats.err then stats = {'unknown'} end
    counts.running = counts.running + numbers.whole(stats[3], 0)
    if (stats[1] or 'running') == 'running' then
      counts.claiming = counts.claiming + 1
      local places = math.min(MAX_PLACES, math.max(0, numbers.whole(stats[2], 0)))
      local request_ms = measured(stats[4]) + measured(stats[5])
      counts.places = counts.places + places
      if request_ms > 0 then counts.ends_per_ms = counts.ends_per_ms + places / request_ms end
    end
  end
  return counts
end

-- The most requests that ran at once, by the samples of the last minute.
function work.most_running()
  local most = 0
  for _, sample in ipairs(recent_samples()) do
    most = math.max(most, measured(sample.running))
  end
  return most
end

-- The number of requests still to be done. Requests that workers hold are half done, on average.
local function left_of(waiting, active) return measured(waiting) + measured(active) / 2 end

-- Output tokens that clients request per second: generated tokens, and the growth of the backlog. This is the
-- maximum over all half minutes of the last minute, so that a short lull changes nothing.
function work.tokens_requested(num_waiting, num_active)
  local most, samples, each = 0, recent_samples(), work.tokens_of_answer()
  for last, newest in ipairs(samples) do
    local until_ms, left = server.now, left_of(num_waiting, num_active)
    if last > 1 then
      until_ms, left = samples[last - 1].at, left_of(samples[last - 1].waiting, samples[last - 1].active)
    end
    local made, first = 0, newest
    for nth = last, #samples do
      if until_ms - samples[nth].at > WINDOW_MS then break end
      made, first = made + measured(samples[nth].tokens_per_second) * SAMPLE_MS, samples[nth]
    end
    local grown = (left - left_of(first.waiting, first.active)) * each * 1000
    local span_ms = math.max(WINDOW_MS, until_ms - first.at)
    -- What was made since the end of the newest sample is not known yet.
    local unknown_ms = math.max(0, math.min(SAMPLE_MS, until_ms - newest.at - SAMPLE_MS))
    most = math.max(most, made / (WINDOW_MS - unknown_ms) + grown / span_ms)
  end
  return most
end

-- What the workers did in the last minute. Only samples in which requests waited show what the workers can do; without
-- any, `were_full` is false, and all samples with output count. Returns a table: `num` finished requests and their
-- `dispersion` (the variance of a sample's number by its mean, at least 1), output `tokens`, in how many `ms`, the mean
-- numbers of requests that were `running` and that workers held (`active`), the most that a worker held while others
-- waited (`most_active`), and in each sample, the time that a running request took for a token (`ms_of_token`).
function work.done_lately()
  local full, all = {}, {}
  for _, sample in ipairs(recent_samples()) do
    local found = {
      num = measured(sample.finished), tokens = measured(sample.tokens_per_second) * SAMPLE_MS / 1000,
      running = measured(sample.running), active = measured(sample.active), workers = measured(sample.workers),
    }
    if measured(sample.waiting) > 0 and found.active > 0 then full[#full + 1] = found end
    if found.num + found.tokens > 0 then all[#all + 1] = found end
  end
  local chosen, squares = #full > 0 and full or all, 0
  local done = {num = 0, dispersion = 1, tokens = 0, running = 0, active = 0, most_active = 0, ms_of_token = {}}
  done.ms, done.were_full = #chosen * SAMPLE_MS, #full > 0
  for _, found in ipairs(chosen) do
    done.num, done.tokens, squares = done.num + found.num, done.tokens + found.tokens, squares + found.num * found.num
    done.running, done.active = done.running + found.running / #chosen, done.active + found.active / #chosen
    if found.running > 0 and found.tokens > 0 then
      done.ms_of_token[#done.ms_of_token + 1] = SAMPLE_MS * found.running / found.tokens
    end
    if #full > 0 and found.workers > 0 then
      done.most_active = math.max(done.most_active, found.active / found.workers)
    end
  end
  if done.num > 0 and #chosen > 1 then
    local mean = done.num / #chosen
    done.dispersion = math.max(1, (squares - done.num * mean) / (#chosen - 1) / mean)
  end
  return done
end

-- The mean time between two requests that leave the queue (ms), from the tokens of the last half minute, or else
-- from the last finished requests; nil if unknown.
local function ms_of_request()
  local samples = samples_since(server.now - WINDOW_MS)
  local made = 0
  for _, sample in ipairs(samples) do made = made + measured(sample.tokens_per_second) end
  if made > 0 then return 1000 * work.tokens_of_answer() * #samples / made end
  local finished = ending.read_outputs()
  if #finished < 2 then return nil end
  return (finished[1][1] - finished[#finished][1]) / (#finished - 1)
end

-- The sum of the weights of all tenants with waiting requests, in parts of this tenant's weight. A tenant has a part
-- of the workers by its weight, so this is the factor by which its requests take longer. Of many tenants, the mean of
-- a sample stands for all.
local weights
local function sum_of_weights()
  local sample, names = redis.pcall('SRANDMEMBER', keys.tenants_waiting, MAX_TENANTS), {}
  if sample.err then sample = {} end
  for _, name in ipairs(sample) do
    if name ~= '' then names[#names + 1] = name end
  end
  local size = #sample == MAX_TENANTS and redis.pcall('SCARD', keys.tenants_waiting)
  local num_of_each = type(size) == 'number' and size / #sample or 1
  local others = redis.call('EXISTS', keys.pending) == 1 and tenants.weight_of('') or 0
  return tenants.sum_of_weights(names) * num_of_each + others
end

function work.share_of(tenant)
  weights = weights or sum_of_weights()
  local own, waits = tenants.weight_of(tenant), redis.call('EXISTS', keys.pending_of(tenant)) == 1
  return math.max(1, (weights + (waits and 0 or own)) / own)
end

-- The time (ms) until `count` requests of a tenant, or of the whole queue if `tenant` is nil, have left the queue.
function work.ms_until_left(count, tenant)
  local each = ms_of_request()
  if not each then return 1000 end
  local share = tenant and work.share_of(tenant) or 1
  return math.max(1, math.min(MAX_WAIT_MS, math.ceil(count * share * each)))
end

local running, ms_each -- how many requests run, and the time (ms) between two ends at full speed; 0 if unknown

-- The time (ms) until the request after `num_before` waiting ones of its tenant has ended, if no overflow worker
-- takes any; 0 if the workers' speed is not measured yet. If no worker claims, one is expected.
function work.ms_until_end(num_before, tenant)
  if not ms_each then
    local workers, speed = work.count_workers(), work.tokens_of_worker()
    running, ms_each = workers.running, 0
    if speed > 0 then ms_each = 1000 * work.tokens_of_answer() / (speed * math.max(1, workers.claiming)) end
  end
  return math.min(MAX_WAIT_MS, ((num_before + 1) * work.share_of(tenant) + running) * ms_each)
end
