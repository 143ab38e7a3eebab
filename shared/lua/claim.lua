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
--                                  prompt_tokens ('' if never tokenised), cost, {event JSON, ...},
--                                  turn}, which is left out where there are no tenants: the score
--                                  whose turn it was when this one was taken
--       {'paused'}
--       {'model', name, fingerprint}   the queue is served by workers of this other model

local worker, lease_ms, max_count, budget = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local capacity, nonce, version = tonumber(ARGV[5]), ARGV[6], tonumber(ARGV[7])
local model, fingerprint, seed_base = ARGV[8], ARGV[9], ARGV[11]

local MAX_PAYLOAD = 8 * 1024 * 1024
local MAX_PASSES = 8    -- how often an oversized request is overtaken before room is kept for it
local MAX_EXAMINED = 512 -- bounds the time of one call when many are cancelled or do not fit
local MAX_TENANTS = 1000 -- as many of them does one call look at

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
  local prompt_tokens = whole(fields.prompt_tokens) or estimated_prompt(#fields.payload)
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

-- The tenants whose requests wait, each with a walk through its own queue. `id` is where the walk
-- stands, nil at its end.
local queues, is_shared = {}, false

local function load_page(queue)
  local page = redis.pcall('ZRANGE', queue.key, queue.seen, queue.seen + queue.page - 1)
  if page.err or #page == 0 then page = {} end
  queue.ids, queue.at, queue.seen = page, 1, queue.seen + #page
  queue.scores = #page > 0 and redis.call('ZMSCORE', queue.key, unpack(page))
end

local function step(queue)
  queue.at = queue.at + 1
  if queue.at > #queue.ids then load_page(queue) end
  queue.id, queue.priority = queue.ids[queue.at], nil
  queue.score = queue.id and queue.scores[queue.at]
  queue.place = queue.id and tonumber(queue.score) or 0
end

local function open(tenant, page)
  local queue = {
    tenant = tenant, key = pending_of(tenant), page = page, ids = {}, at = 0, seen = 0, services = {},
  }
  step(queue)
  queues[#queues + 1] = queue
end

local function open_all()
  local tenants = redis.pcall('SRANDMEMBER', tenants_waiting, MAX_TENANTS)
  is_shared = not tenants.err and #tenants > 0
  open('', is_shared and 4 or 32)
  for _, tenant in ipairs(is_shared and tenants or {}) do
    if tenant == tenant_name(tenant) then
      if tenant ~= '' then open(tenant, 4) end
    else
      redis.call('SREM', tenants_waiting, tenant) -- no key may have this name
    end
  end
end

local function is_before(one, other)
  return one.place < other.place or one.place == other.place and one.id < other.id
end

-- The priority of the request where a walk stands.
local function priority_at(queue)
  if not queue.priority then
    local fields = read_request(queue.id, 'priority') or {}
    queue.priority = whole(fields.priority)
    if not queue.priority then
      fields = read_request(queue.id, 'payload') or {}
      queue.priority = fields.payload and number_in(fields.payload, 'priority') or 0
    end
  end
  return queue.priority
end

local clocks, served = {}, {} -- by counters; `served` has what is to be written

local function clock_of(key)
  clocks[key] = clocks[key] or tonumber(redis.call('ZSCORE', key, '*') or 0)
  return clocks[key]
end

local function service_of(queue, key)
  if not queue.services[key] then
    queue.services[key] = tonumber(redis.call('ZSCORE', key, queue.tenant) or clock_of(key))
  end
  return queue.services[key]
end

-- Whose request is looked at next, and the score whose turn it is. The lowest score of all says which
-- priority is served; of the tenants that wait with this priority, the one with the least service goes
-- first.
local function next_queue()
  local first
  for _, queue in ipairs(queues) do
    if queue.id and (not first or is_before(queue, first)) then first = queue end
  end
  if not first or #queues == 1 then return first, first and first.score end
  local level, best = priority_at(first), first
  local key = counters_of(level)
  for _, queue in ipairs(queues) do
    if queue.id and queue ~= best then
      local less = service_of(queue, key) - service_of(best, key)
      if (less < 0 or less == 0 and is_before(queue, best)) and priority_at(queue) == level then
        best = queue
      end
    end
  end
  return best, first.score
end

-- Count a prompt as service; the clock shows what its tenant had before.
local function charge_now(queue, priority, prompt_tokens)
  local key = counters_of(priority)
  local before = service_of(queue, key)
  served[key] = served[key] or {}
  served[key][queue.tenant] = before + PROMPT_WEIGHT * prompt_tokens / weight_of(queue.tenant)
  queue.services[key] = served[key][queue.tenant]
  clocks[key] = math.max(clock_of(key), before)
end

local function waits_at(queue, key)
  return queue and queue.id and counters_of(priority_at(queue)) == key
end

-- Write the counters and the clock of a priority, and forget the counters that the clock has passed,
-- except of those who still wait there (they may have been given back what an estimate took).
local function settle(key, services)
  local changes, by_tenant, most, anyone = {}, {}, 0, false
  for tenant, service in pairs(services) do
    most = math.max(most, service)
    changes[#changes + 1] = string.format('%.17g', service)
    changes[#changes + 1] = tenant
  end
  for _, queue in ipairs(queues) do
    by_tenant[queue.tenant] = queue
    anyone = anyone or waits_at(queue, key)
  end
  if not anyone then clocks[key] = math.max(clocks[key], most) end -- nobody is behind
  changes[#changes + 1] = string.format('%.17g', clocks[key])
  changes[#changes + 1] = '*'
  call_for_all('ZADD', key, changes)
  local passed = redis.call('ZRANGE', key, '-inf', string.format('%.17g', clocks[key]), 'BYSCORE',
    'LIMIT', 0, 1000)
  for _, tenant in ipairs(passed) do
    if tenant ~= '*' and not waits_at(by_tenant[tenant], key) then remove_later(key, tenant) end
  end
  redis.call('PEXPIRE', key, COUNTERS_TTL_MS)
end

-- How many wait now. Forgets tenants that have nothing left, and what was counted of them once nothing
-- waits at all.
local function count_waiting(num_claims)
  local sum, gone = 0, {}
  for _, queue in ipairs(queues) do
    local count = redis.pcall('ZCARD', queue.key)
    if type(count) == 'number' then sum = sum + count end
    if count == 0 and queue.tenant ~= '' then gone[#gone + 1] = queue.tenant end
  end
  call_for_all('SREM', tenants_waiting, gone)
  if sum == 0 and num_claims == 0 and #queues <= MAX_TENANTS and redis.call('ZCARD', delayed) == 0 then
    redis.call('DEL', backlog)
    if is_shared and redis.call('ZCARD', leases) == 0 then redis.call('DEL', tenants_waiting) end
  elseif is_shared then
    redis.call('SADD', tenants_waiting, '') -- from now on the tenant without a name pays too
  end
  return sum
end

local taken = {} -- a stranger may have put an id into the queues of two tenants

local function claim(queue, fields, cost, has_log, turn)
  local id, score = queue.id, queue.score
  local attempt = whole(fields.attempt, 0) + 1
  local fence = attempt .. '-' .. nonce
  local seed = whole(fields.seed) and fields.seed or exact(seed_of(id, seed_of_base))
  local enqueued_at = whole(fields.enqueued_at) and fields.enqueued_at or now_text
  redis.call('HSET', request_key(id), 'state', 'active', 'attempt', attempt, 'fence', fence,
    'worker', worker, 'seed', seed, 'score', score, 'enqueued_at', enqueued_at,
    'claimed_at', now_text)
  if fields.state == 'waiting' then
    count_later('tokens', tenant_name(fields.tenant), -whole(fields.tokens, 0))
  end
  if is_shared then
    local level = priority_at(queue)
    redis.call('HSET', request_key(id), 'tenant', queue.tenant, 'priority', exact(level))
    if attempt == 1 then
      charge_now(queue, level, whole(fields.prompt_tokens) or estimated_prompt(#fields.payload))
    end
    taken[id] = true
  end
  new_leases[#new_leases + 1] = expiry
  new_leases[#new_leases + 1] = id
  remove_later(queue.key, id)
  return {id, fields.payload, fence, attempt, score, seed, enqueued_at,
    whole(fields.prompt_tokens, ''), exact(cost), has_log and log_events(id) or {},
    is_shared and turn or nil}
end

promote_delayed()
local output, expired = measured_output(), past_deadline()
local claims, taken_tokens, passed_over = {}, 0, {}
local examined, walking = 0, true -- nothing leaves a queue before the walk is over

-- Take, end or pass over the request where a tenant's walk stands.
local function examine(queue, turn)
  local id = queue.id
  local function fail(message)
    remove_later(queue.key, id)
    finish_bare(id, 'error', 'invalid_request', message)
  end
  local function end_with(reason)
    remove_later(queue.key, id)
    finish_bare(id, reason)
  end
  if #id > 200 or string.find(id, '[^\33-\126]') then
    return fail('id: is not 1 to 200 printable ASCII characters without spaces')
  end
  local fields = read_request(id, 'payload', 'state', 'cancelled', 'attempt', 'prompt_tokens',
    'seed', 'enqueued_at', 'priority', 'passed', 'last_event', 'tenant', 'tokens')
  if not fields then return fail('request: the key promptq:{queue}:request:ID is not a hash') end
  if is_final(fields.state) then
    if fields.last_event then publish_event(id, fields.last_event) end
    remove_later(queue.key, id)
    drop_holds(id, fields.tenant)
    return
  end
  if fields.state == 'active' and (taken[id] or redis.call('ZSCORE', leases, id)) then
    remove_later(queue.key, id)
    return
  end
  if not fields.payload then return fail('payload: the request has no hash, or its hash has no payload') end
  if #fields.payload > MAX_PAYLOAD then
    return fail(string.format('payload: %d bytes are more than the %d allowed', #fields.payload, MAX_PAYLOAD))
  end
  local kind = redis.call('TYPE', tokens_key(id)).ok
  if kind ~= 'stream' and kind ~= 'none' then
    return fail('tokens: the key promptq:{queue}:tokens:ID is not a stream')
  end
  if fields.cancelled == '1' then return end_with('cancelled') end
  if expired[id] then return end_with('expired') end
  if is_newer(fields.payload) then return end

  local priority = tonumber(fields.priority) or number_in(fields.payload, 'priority') or 0
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
  claims[#claims + 1] = claim(queue, fields, cost, kind == 'stream', turn)
end

open_all()
while walking and examined < MAX_EXAMINED and #claims < max_count + #preemptible do
  local queue, turn = next_queue()
  if not queue then break end
  examined = examined + 1
  examine(queue, turn)
  step(queue)
end
call_for_all('ZADD', leases, new_leases)
for key, services in pairs(served) do settle(key, services) end
carry_out()
return {'ok', now_text, count_waiting(#claims), unpack(claims)}
