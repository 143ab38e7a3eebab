-- Give a worker the requests it has room for, in queue order.
-- KEYS  1 pending
-- ARGV  1 worker id           2 lease (ms)
--       3 max count           4 token budget: KV tokens that are free
--       5 capacity: KV tokens of the whole worker; no request costs more than that
--       6 nonce: random, new for each call
--       7 protocol version that the worker reads
--       8 model name          9 model fingerprint ('' and '': any model)
--      10 preemptible: 'priority:tokens ...' of running sequences; a more urgent request may
--         count their slots and tokens as free, since it will preempt them
--      11 seed base: requests without a seed get one made of this and their id
-- Reply {'ok', now, still pending, claim, ...}, each claim {id, payload, fence, attempt, score, seed, enqueued_at,
--                                  prompt_tokens ('' if never tokenised), cost, {event JSON, ...}}
--       {'paused'}
--       {'model', name, fingerprint}   the queue is served by workers of this other model

local worker, lease_ms, max_count, budget = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local capacity, nonce, version = tonumber(ARGV[5]), ARGV[6], tonumber(ARGV[7])
local model, fingerprint, seed_base = ARGV[8], ARGV[9], ARGV[11]

local MAX_PAYLOAD = 8 * 1024 * 1024
local MAX_PASSES = 8    -- how often an oversized request is overtaken before room is kept for it
local MAX_EXAMINED = 512 -- bounds the time of one call when many are cancelled or do not fit
local PAGE = 32
local DEFAULT_OUTPUT = 256 -- expected output while no request has finished yet

if config('paused') == '1' then return {'paused'} end
if fingerprint ~= '' then
  redis.call('HSETNX', prefix .. 'config', 'fingerprint', fingerprint)
  redis.call('HSETNX', prefix .. 'config', 'model', model)
  if config('fingerprint') ~= fingerprint then
    return {'model', config('model'), config('fingerprint')}
  end
end

local preemptible = {}
for priority, tokens in string.gmatch(ARGV[10], '(-?%d+):(%d+)') do
  preemptible[#preemptible + 1] = {tonumber(priority), tonumber(tokens)}
end

-- Slots and tokens that a request of this priority may take from less urgent ones.
local function preemptible_for(priority)
  local count, tokens = 0, 0
  for _, running in ipairs(preemptible) do
    if running[1] > priority then count, tokens = count + 1, tokens + running[2] end
  end
  return count, tokens
end

-- 9 of 10 finished requests had no more output than this.
local function measured_output()
  local counts = {}
  for i, entry in ipairs(redis.call('LRANGE', outputs, 0, -1)) do
    counts[i] = tonumber(string.match(entry, ' (%d+)$'))
  end
  if #counts == 0 then return DEFAULT_OUTPUT end
  table.sort(counts)
  return counts[math.ceil(#counts * 0.9)]
end

local function is_newer(payload)
  if (number_in(payload, 'version') or 1) <= version then return false end
  local parsed, request = pcall(cjson.decode, payload)
  return parsed and type(request) == 'table' and (tonumber(request.version) or 1) > version
end

local function cost_of(fields, output)
  local prompt_tokens = whole(fields.prompt_tokens) or math.ceil(#fields.payload / 4)
  local max_tokens = number_in(fields.payload, 'max_tokens') or output
  return math.max(0, math.min(prompt_tokens + math.min(max_tokens, output), capacity))
end

-- A number below 2^47 for a text; who samples mixes it further, so it need only be different.
local function seed_of(text)
  local seed = 0
  for i = 1, #text do seed = (seed * 33 + string.byte(text, i)) % 140737488355213 end
  return seed
end

local function claim(id, fields, score, cost)
  local attempt = whole(fields.attempt, 0) + 1
  local fence = attempt .. '-' .. nonce
  local seed = exact(whole(fields.seed) or seed_of(seed_base .. id))
  local enqueued_at = exact(whole(fields.enqueued_at, now))
  redis.call('HSET', request_key(id), 'state', 'active', 'attempt', attempt, 'fence', fence,
    'worker', worker, 'seed', seed, 'score', score, 'enqueued_at', enqueued_at,
    'claimed_at', exact(now))
  redis.call('ZADD', leases, exact(now + lease_ms), id)
  redis.call('ZREM', pending, id)
  return {id, fields.payload, fence, attempt, score, seed, enqueued_at,
    whole(fields.prompt_tokens, ''), exact(cost), log_events(id)}
end

promote_delayed()
local output, expired = measured_output(), past_deadline()
local claims, taken_tokens, passed_over = {}, 0, {}
local offset, examined, walking = 0, 0, true

-- Look at the request at the front; true if it left pending.
local function examine(id, score)
  if #id > 200 or string.find(id, '[^\33-\126]') then
    finish_bare(id, 'error', 'invalid_request',
      'id: is not 1 to 200 printable ASCII characters without spaces')
    return true
  end
  local size = redis.pcall('HSTRLEN', request_key(id), 'payload')
  if type(size) == 'number' and size > MAX_PAYLOAD then
    finish_bare(id, 'error', 'invalid_request', string.format(
      'payload: %d bytes are more than the %d allowed', size, MAX_PAYLOAD))
    return true
  end
  local fields = read_request(id, 'payload', 'state', 'cancelled', 'attempt', 'prompt_tokens',
    'seed', 'enqueued_at', 'priority', 'passed', 'last_event')
  if not fields then
    finish_bare(id, 'error', 'invalid_request', 'request: the key promptq:{queue}:request:ID is not a hash')
    return true
  end
  if is_final(fields.state) then
    if fields.last_event then publish_event(id, fields.last_event) end
    drop_holds(id)
    return true
  end
  if fields.state == 'active' and redis.call('ZSCORE', leases, id) then
    redis.call('ZREM', pending, id)
    return true
  end
  if not fields.payload then
    finish_bare(id, 'error', 'invalid_request', 'payload: the request has no hash, or its hash has no payload')
    return true
  end
  local kind = redis.call('TYPE', tokens_key(id)).ok
  if kind ~= 'stream' and kind ~= 'none' then
    finish_bare(id, 'error', 'invalid_request', 'tokens: the key promptq:{queue}:tokens:ID is not a stream')
    return true
  end
  if fields.cancelled == '1' then finish_bare(id, 'cancelled') return true end
  if expired[id] then finish_bare(id, 'expired') return true end
  if is_newer(fields.payload) then return false end

  local priority = tonumber(fields.priority) or number_in(fields.payload, 'priority') or 0
  local cost = cost_of(fields, output)
  local more_slots, more_tokens = preemptible_for(priority)
  if #claims >= max_count + more_slots then
    walking = false
    return false
  end
  if taken_tokens + cost > budget + more_tokens then
    local passed = whole(fields.passed, 0)
    passed_over[#passed_over + 1] = {id, passed}
    if passed >= MAX_PASSES then walking = false end
    return false
  end
  -- Those that were passed over count it once something behind them was taken.
  for _, overtaken in ipairs(passed_over) do
    redis.call('HSET', request_key(overtaken[1]), 'passed', overtaken[2] + 1)
  end
  passed_over = {}
  taken_tokens = taken_tokens + cost
  claims[#claims + 1] = claim(id, fields, score, cost)
  return true
end

while walking and examined < MAX_EXAMINED and #claims < max_count + #preemptible do
  local page = redis.call('ZRANGE', pending, offset, offset + PAGE - 1)
  if #page == 0 then break end
  for _, id in ipairs(page) do
    examined = examined + 1
    if not walking or #claims >= max_count + #preemptible then break end
    if not examine(id, redis.call('ZSCORE', pending, id)) then offset = offset + 1 end
  end
end
return {'ok', exact(now), redis.call('ZCARD', pending), unpack(claims)}
