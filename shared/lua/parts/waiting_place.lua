-- Stands right in front of `cancel.lua`, `reprioritise.lua` and `sweep.lua`: where an id waits.

-- The queue in which an id waits: its tenant's, or wherever a stranger put it; nil for none.
local function queue_of(id, tenant)
  local home = pending_of(tenant_name(tenant))
  local place_at_home = redis.pcall('ZSCORE', home, id)
  if place_at_home and type(place_at_home) ~= 'table' then return home end
  for _, key in ipairs(waiting_queues()) do
    if redis.call('ZSCORE', key, id) then return key end
  end
end

