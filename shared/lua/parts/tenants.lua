-- Whose a request is, where it waits, and what its tenant is counted: service received, and backlog.

-- A tenant's name; that of the tenant without a name for what no key should hold.
local function tenant_name(value)
  if value and #value <= 64 and string.find(value, '^[%w_.%-]+$') then return value end
  return ''
end

-- The ids of a tenant that wait; plain `pending` is that of the tenant without a name.
local function pending_of(tenant)
  return tenant == '' and pending or pending .. ':' .. tenant
end

-- Tenants that have something waiting, for claims to look at.
local tenants_waiting = prefix .. 'tenants:waiting'

-- Service by tenant; each priority shares its tokens among those who wait at it. The member `*` is the
-- clock: what the tenant that was served last had received, the least of all who waited. Who has no
-- counter starts there, so that time spent idle is neither saved up nor held against anyone.
local function counters_of(priority)
  priority = math.max(-1000, math.min(1000, math.floor(priority)))
  return prefix .. 'tenants' .. (priority == 0 and '' or string.format(':%d', priority))
end

local PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2 -- of a token's service, as in the paper (OSDI 2024)
local COUNTERS_TTL_MS = 3600000           -- of a priority at which nobody was served so long

local function weight_of(tenant)
  local weight = tonumber(config('weight:' .. tenant) or nil)
  return weight and weight >= 1e-6 and weight <= 1e6 and weight or 1
end

-- Service that was given meanwhile. Tenants share only what was claimed while there were any.
local function charge_later(tenant, priority, service)
  local key = counters_of(priority)
  charges[key] = charges[key] or {}
  charges[key][tenant] = (charges[key][tenant] or 0) + service
end

local function charge(key, services)
  for tenant, service in pairs(services) do
    service = service / weight_of(tenant)
    if redis.pcall('ZADD', key, 'XX', 'INCR', string.format('%.17g', service), tenant) == false then
      local clock = score_in(key, '*') or 0
      redis.call('ZADD', key, string.format('%.17g', clock + service), tenant)
      redis.call('PEXPIRE', key, COUNTERS_TTL_MS)
    end
  end
end

-- What waits, for the limits of `enqueue`: a request counts from when a script makes its state
-- `waiting` until a script makes it another one.
local backlog = prefix .. 'backlog'

local function count_later(kind, tenant, change)
  if change == 0 then return end
  local field = kind .. ':' .. tenant
  backlog_changes[field] = (backlog_changes[field] or 0) + change
end

local DEFAULT_OUTPUT = 256 -- expected output while no request has finished yet

-- Length of a prompt by that of its payload, until a tokenizer has seen it.
local function estimated_prompt(payload_length) return math.ceil(payload_length / 4) end

-- Tokens that a request counts as while it waits.
local function estimated_tokens(payload)
  local max_tokens = number_in(payload, 'max_tokens') or DEFAULT_OUTPUT
  return estimated_prompt(#payload) + math.max(0, math.min(max_tokens, 2147483648))
end

-- Put an id into its tenant's queue; into plain `pending` where a stranger spoilt that.
local function put_waiting(id, score, tenant)
  tenant = tenant_name(tenant)
  local known = tenant ~= '' and redis.pcall('SADD', tenants_waiting, tenant)
  if type(known) == 'number' and type(redis.pcall('ZADD', pending_of(tenant), score, id)) == 'number' then
    return
  end
  redis.call('ZADD', pending, score, id)
end

-- The keys of all tenants' queues, plain `pending` first.
local function waiting_queues()
  local keys, tenants = {pending}, redis.pcall('SMEMBERS', tenants_waiting)
  for _, tenant in ipairs(tenants.err and {} or tenants) do
    local key = pending_of(tenant_name(tenant))
    if key ~= pending and redis.call('TYPE', key).ok == 'zset' then keys[#keys + 1] = key end
  end
  return keys
end

-- A request stops waiting. `fields`: state, tenant and tokens as they were before.
local function leave_backlog(id, fields)
  if fields.state ~= 'waiting' then return end
  local tenant = tenant_name(fields.tenant)
  count_later('tokens', tenant, -whole(fields.tokens, 0))
  if score_in(delayed, id) then count_later('delayed', tenant, -1) end
end

-- Write a prompt's exact length, and set right what was charged by an estimate. `tenant` is nil for
-- those who are not charged.
local function tell_prompt_tokens(id, prompt_tokens, tenant, priority)
  local key = request_key(id)
  if redis.call('HSET', key, 'prompt_tokens', prompt_tokens) == 1 and tenant then
    local estimate = estimated_prompt(redis.call('HSTRLEN', key, 'payload'))
    local service = PROMPT_WEIGHT * (tonumber(prompt_tokens) - estimate)
    charge_later(tenant_name(tenant), whole(priority, 0), service)
  end
end
