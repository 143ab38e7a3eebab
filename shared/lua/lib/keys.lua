-- The names of the queue's keys. KEYS[1] is always the queue's `pending`, and all other names begin with its
-- prefix. The prefix has the queue as a hash tag, so all keys of a script are on one shard of a cluster.

-- While a cluster moves the slot key by key, keys that have moved would look missing. During a move, the server
-- refuses a command about two keys if one of them does not exist. Then the script ends before it writes.
local moving = redis.pcall('EXISTS', KEYS[1], KEYS[1] .. ':')
if type(moving) == 'table' then
  for _, refusal in ipairs({'The user', 'ACL failure'}) do -- on Redis 7.0, and on later ones
    if string.find(moving.err, refusal) then return moving end
  end
  return redis.error_reply('TRYAGAIN the cluster moves the slot of this queue')
end

local prefix = string.sub(KEYS[1], 1, -8)
keys.prefix, keys.pending = prefix, KEYS[1]
-- All databases share channels, and a script cannot read its database's number: the caller may put a line before
-- the script that sets it.
keys.channels = KEYS.database and prefix .. KEYS.database .. ':' or prefix
keys.leases, keys.deadlines = prefix .. 'leases', prefix .. 'deadlines'
keys.delayed, keys.dead = prefix .. 'delayed', prefix .. 'dead'
keys.backlog = prefix .. 'backlog' -- counts what waits, for the limits of `enqueue`
keys.tenants_waiting = prefix .. 'tenants:waiting' -- tenants with waiting requests, for claims

function keys.request(id) return prefix .. 'request:' .. id end
function keys.tokens(id) return prefix .. 'tokens:' .. id end
function keys.events(id) return keys.channels .. 'events:' .. id end

-- A tenant's name, or '' (the tenant without a name) for a value that no key may contain.
function keys.tenant_name(value)
  if value and #value <= 64 and string.find(value, '^[%w_.%-]+$') then return value end
  return ''
end

-- The key of a tenant's queue. The tenant without a name has plain `pending`.
function keys.pending_of(tenant)
  tenant = keys.tenant_name(tenant)
  return tenant == '' and keys.pending or keys.pending .. ':' .. tenant
end

-- The key of the ids of a tenant that workers hold.
function keys.running_of(tenant)
  tenant = keys.tenant_name(tenant)
  return prefix .. 'tenants:running' .. (tenant == '' and '' or ':' .. tenant)
end
