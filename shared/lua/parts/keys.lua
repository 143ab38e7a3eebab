-- What the queue's keys are called. KEYS[1] is always the queue's `pending`; all other names are built on
-- its prefix, which carries the queue as hash tag, so that a script stays on one cluster shard.

local prefix = string.sub(KEYS[1], 1, -8)
keys.prefix, keys.pending = prefix, KEYS[1]
keys.leases, keys.deadlines = prefix .. 'leases', prefix .. 'deadlines'
keys.delayed, keys.dead = prefix .. 'delayed', prefix .. 'dead'
keys.backlog = prefix .. 'backlog' -- what waits, for the limits of `enqueue`
keys.tenants_waiting = prefix .. 'tenants:waiting' -- who has something waiting, for claims to look at

function keys.request(id) return prefix .. 'request:' .. id end
function keys.tokens(id) return prefix .. 'tokens:' .. id end
function keys.events(id) return prefix .. 'events:' .. id end

-- A tenant's name; that of the tenant without a name for what no key should hold.
function keys.tenant_name(value)
  if value and #value <= 64 and string.find(value, '^[%w_.%-]+$') then return value end
  return ''
end

-- The ids of a tenant that wait; plain `pending` is that of the tenant without a name.
function keys.pending_of(tenant)
  tenant = keys.tenant_name(tenant)
  return tenant == '' and keys.pending or keys.pending .. ':' .. tenant
end
