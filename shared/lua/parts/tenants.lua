-- uses: keys, numbers, server, requests
-- What a tenant is counted: the service that it received. Each priority shares its tokens among those who
-- wait at it. The member `*` of its counters is the clock: what the tenant that was served last had
-- received, the least of all who waited. Who has no counter starts there, so that time spent idle is
-- neither saved up nor held against anyone.

tenants.PROMPT_WEIGHT, tenants.OUTPUT_WEIGHT = 1, 2 -- of a token's service, as in the paper (OSDI 2024)
tenants.COUNTERS_TTL_MS = 3600000                   -- of a priority at which nobody was served so long

function tenants.counters_of(priority)
  priority = math.max(-1000, math.min(1000, math.floor(priority)))
  return keys.prefix .. 'tenants' .. (priority == 0 and '' or string.format(':%d', priority))
end

function tenants.weight_of(tenant)
  local weight = tonumber(server.config('weight:' .. tenant) or nil)
  return weight and weight >= 1e-6 and weight <= 1e6 and weight or 1
end

-- Service that was given meanwhile. Tenants share only what was claimed while there were any.
local charges = {} -- by counters and tenant
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

-- Write a prompt's exact length, and set right what was charged by an estimate. `tenant` is nil for
-- those who are not charged.
function tenants.tell_prompt_tokens(id, prompt_tokens, tenant, priority)
  local key = keys.request(id)
  if redis.call('HSET', key, 'prompt_tokens', prompt_tokens) == 1 and tenant then
    local estimate = requests.estimated_prompt(redis.call('HSTRLEN', key, 'payload'))
    local service = tenants.PROMPT_WEIGHT * (tonumber(prompt_tokens) - estimate)
    tenants.charge_later(tenant, numbers.whole(priority, 0), service)
  end
end
