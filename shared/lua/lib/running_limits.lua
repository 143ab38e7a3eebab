-- uses: keys, server
-- The limit of requests of a tenant that workers hold at once. Claims add ids to a sorted set of the tenant, and
-- all code that ends a lease removes them.

local NUM_CHECKED = 8 -- ids that a claim at the limit, or a sweep, compares with the leases

local limits, numbers_held, claimed = {}, {}, {} -- by tenant; the others by the tenant's key

-- Remove ids that no worker holds, as workers of earlier releases leave them. The score is the time of the last
-- check, so each call checks other ids.
function running_limits.forget_gone(key)
  local ids, alive = server.due(key, '+inf', NUM_CHECKED), {}
  local leases = #ids > 0 and redis.call('ZMSCORE', keys.leases, unpack(ids)) or {}
  for nth, id in ipairs(ids) do
    if leases[nth] then
      alive[#alive + 1] = server.now_text
      alive[#alive + 1] = id
    else
      redis.pcall('ZREM', key, id)
    end
  end
  server.for_all(redis.pcall, 'ZADD', key, alive)
end

-- Whether a tenant has reached its limit.
function running_limits.is_reached(tenant)
  local limit = limits[tenant] or server.number('max_running:' .. tenant, server.number('tenant_max_running', 0))
  limits[tenant] = limit
  if limit <= 0 then return false end
  local key = keys.running_of(tenant)
  if not numbers_held[key] then
    if server.size(key) >= limit then running_limits.forget_gone(key) end
    numbers_held[key] = server.size(key)
  end
  return numbers_held[key] + #(claimed[key] or {}) / 2 >= limit
end

-- Count a claimed request.
function running_limits.count(tenant, id)
  local key = keys.running_of(tenant)
  local ids = claimed[key] or {}
  claimed[key], ids[#ids + 1] = ids, server.now_text
  ids[#ids + 1] = id
end

server.at_the_end(function()
  for key, ids in pairs(claimed) do server.for_all(redis.pcall, 'ZADD', key, ids) end
  claimed, numbers_held = {}, {}
end)
