-- uses: keys, numbers, server, requests
-- Counts the service (weighted tokens) that each tenant received. Each priority has separate counters, because
-- the tenants that wait at it share its tokens. The member `*` is the clock: the service that the last served
-- tenant had received before, the least of all waiting tenants. A tenant without a counter starts at the clock,
-- so idle time neither earns nor costs service.

tenants.PROMPT_WEIGHT, tenants.OUTPUT_WEIGHT = 1, 2 -- service per token (Sheng et al., OSDI 2024)
tenants.COUNTERS_TTL_MS = 3600000                   -- counters are kept for this time after the last service

function tenants.counters_of(priority)
  priority = math.max(-1000, math.min(1000, math.floor(priority)))
  return keys.prefix .. 'tenants' .. (priority == 0 and '' or string.format(':%d', priority))
end

local function weight_in(setting)
  local weight = tonumber(setting or nil)
  return weight and weight >= 1e-6 and weight <= 1e6 and weight or 1
end

function tenants.weight_of(tenant) return weight_in(server.config('weight:' .. tenant)) end

-- The sum of the weights of several tenants, by one command.
function tenants.sum_of_weights(names)
  local settings, sum = {}, 0
  for nth, name in ipairs(names) do settings[nth] = 'weight:' .. name end
  for _, setting in ipairs(#names > 0 and redis.call('HMGET', keys.prefix .. 'config', unpack(settings)) or {}) do
    sum = sum + weight_in(setting)
  end
  return sum
end

-- Count service at the end of the call. It counts only for requests that were claimed while tenants shared.
local charges = {} -- by the key of the counters and tenant
function tenants.charge_later(tenant, priority, service)
  local key = tenants.counters_of(priority)
  tenant = keys.tenant_name(tenant)
  charges[key] = charges[key] or {}
  charges[key][tenant] = (charges[key][tenant] or 0) + service
end

local function charge(key, tenant, service)
  service = service / tenants.weight_of(tenant)
  if redis.pcall('ZADD', key, 'XX', 'INCR', numbers.precise(service), tenant) == false then
    local clock = server.score_in(key, '*') or 0
    redis.call('ZADD', key, numbers.precise(clock + service), tenant)
    redis.call('PEXPIRE', key, tenants.COUNTERS_TTL_MS)
  end
end

server.at_the_end(function()
  for key, services in pairs(charges) do
    for tenant, service in pairs(services) do charge(key, tenant, service) end
  end
  charges = {}
end)

-- Write a prompt's exact length, and correct what was charged by an estimate. `tenant` is nil for a request
-- that is not charged.
function tenants.note_prompt_tokens(id, prompt_tokens, tenant, priority)
  local key = keys.request(id)
  if redis.call('HSET', key, 'prompt_tokens', prompt_tokens) == 1 and tenant then
    local estimate = requests.estimated_prompt(redis.call('HGET', key, 'payload') or '')
    local service = tenants.PROMPT_WEIGHT * (tonumber(prompt_tokens) - estimate)
    tenants.charge_later(tenant, numbers.whole(priority, 0), service)
  end
end
