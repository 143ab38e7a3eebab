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
local preemptible_by = {}
local function preemptible_for(priority)
  local found = preemptible_by[priority]
  if not found then
    found = {0, 0}
    for _, running in ipairs(preemptible) do
      if running[1] > priority then found = {found[1] + 1, found[2] + running[2]} end
    end
    preemptible_by[priority] = found
  end
  return found[1], found[2]
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

-- A number below 2^47 for a text that goes on behind one that gave `seed`; who samples mixes it
-- further, so it need only be different.
local function seed_of(text, seed)
  for i = 1, #text do seed = (seed * 33 + string.byte(text, i)) % 140737488355213 end
  return seed
end
local seed_of_base = seed_of(seed_base, 0)

local expiry, new_leases = exact(now + lease_ms), {}

local function claim(id, fields, score, cost, has_log)
  local attempt = whole(fields.attempt, 0) + 1
  local fence = attempt .. '-' .. nonce
  local seed = whole(fields.seed) and fields.seed or exact(seed_of(id, seed_of_base))
  local enqueued_at = whole(fields.enqueued_at) and fields.enqueued_at or now_text
  redis.call('HSET', request_key(id), 'state', 'active', 'attempt', attempt, 'fence', fence,
    'worker', worker, 'seed', seed, 'score', score, 'enqueued_at', enqueued_at,
    'claimed_at', now_text)
  new_leases[#new_leases + 1] = expiry
  new_leases[#new_leases + 1] = id
  remove_later(pending, id)
  return {id, fields.payload, fence, attempt, score, seed, enqueued_at,
    whole(fields.prompt_tokens, ''), exact(cost), has_log and log_events(id) or {}}
end

promote_delayed()
local output, expired = measured_output(), past_deadline()
local claims, taken_tokens, passed_over = {}, 0, {}
local examined, walking = 0, true -- nothing leaves `pending` before the walk is over

-- Take, end or pass over one request that waits.
local function examine(id, score)
  if #id > 200 or string.find(id, '[^\33-\126]') then
    finish_bare(id, 'error', 'invalid_request',
      'id: is not 1 to 200 printable ASCII characters without spaces')
    return
  end
  local fields = read_request(id, 'payload', 'state', 'cancelled', 'attempt', 'prompt_tokens',
    'seed', 'enqueued_at', 'priority', 'passed', 'last_event')
  if not fields then
    finish_bare(id, 'error', 'invalid_request', 'request: the key promptq:{queue}:request:ID is not a hash')
    return
  end
  if is_final(fields.state) then
    if fields.last_event then publish_event(id, fields.last_event) end
    drop_holds(id)
    return
  end
  if fields.state == 'active' and redis.call('ZSCORE', leases, id) then
    remove_later(pending, id)
    return
  end
  if not fields.payload then
    finish_bare(id, 'error', 'invalid_request', 'payload: the request has no hash, or its hash has no payload')
    return
  end
  if #fields.payload > MAX_PAYLOAD then
    finish_bare(id, 'error', 'invalid_request', string.format(
      'payload: %d bytes are more than the %d allowed', #fields.payload, MAX_PAYLOAD))
    return
  end
  local kind = redis.call('TYPE', tokens_key(id)).ok
  if kind ~= 'stream' and kind ~= 'none' then
    finish_bare(id, 'error', 'invalid_request', 'tokens: the key promptq:{queue}:tokens:ID is not a stream')
    return
  end
  if fields.cancelled == '1' then return finish_bare(id, 'cancelled') end
  if expired[id] then return finish_bare(id, 'expired') end
  if is_newer(fields.payload) then return end

  local priority = whole(fields.priority) or number_in(fields.payload, 'priority') or 0
  local cost = cost_of(fields, output)
  local more_slots, more_tokens = preemptible_for(priority)
  if #claims >= max_count + more_slots then
    walking = false
    return
  end
  if taken_tokens + cost > budget + more_tokens then
    local passed = whole(fields.passed, 0)
    passed_over[#passed_over + 1] = {id, passed}
    if passed >= MAX_PASSES then walking = false end
    return
  end
  -- Those that were passed over count it once something behind them was taken.
  for _, overtaken in ipairs(passed_over) do
    redis.call('HSET', request_key(overtaken[1]), 'passed', overtaken[2] + 1)
  end
  passed_over = {}
  taken_tokens = taken_tokens + cost
  claims[#claims + 1] = claim(id, fields, score, cost, kind == 'stream')
end

while walking and examined < MAX_EXAMINED and #claims < max_count + #preemptible do
  local page = redis.call('ZRANGE', pending, examined, examined + PAGE - 1)
  if #page == 0 then break end
  local scores = redis.call('ZMSCORE', pending, unpack(page))
  for i, id in ipairs(page) do
    if not walking or #claims >= max_count + #preemptible then break end
    examined = examined + 1
    examine(id, scores[i])
  end
end
call_for_all('ZADD', leases, new_leases)
carry_out()
return {'ok', now_text, redis.call('ZCARD', pending), unpack(claims)}
