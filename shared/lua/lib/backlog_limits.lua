-- uses: keys, numbers, server, pending, work
-- How many requests, and how many tokens, may wait: in the whole queue, and of each tenant.

local function counted(field) return numbers.whole(redis.call('HGET', keys.backlog, field), 0) end

local function tokens_in_all()
  local sum, fields = 0, redis.call('HGETALL', keys.backlog)
  for i = 1, #fields, 2 do
    if string.find(fields[i], '^tokens:') then sum = sum + numbers.whole(fields[i + 1], 0) end
  end
  return sum
end

local function num_waiting_in_all()
  local num = redis.call('ZCARD', keys.delayed)
  for _, key in ipairs(pending.queues()) do num = num + redis.call('ZCARD', key) end
  return num
end

local function limit(name, default) return server.number(name, default and server.number(default, 0) or 0) end

-- The reply if a limit has no room for the new requests, else nil. `count` returns how many requests wait, and
-- `tokens` how many tokens they count as. Both are called only if there is a limit.
local function refusal_by(name, default, new, count, tokens, tenant)
  local tokens_name = string.gsub(name, '^max_pending', 'max_pending_tokens')
  local max_requests, max_tokens = limit(name, default), limit(tokens_name, default and default .. '_tokens')
  if max_requests <= 0 and max_tokens <= 0 then return nil end
  local num = count()
  local excess = num + new[1] - max_requests
  if max_requests > 0 and excess > 0 then
    return {'full', work.ms_until_left(excess, tenant), name, numbers.exact(max_requests)}
  end
  if max_tokens <= 0 then return nil end
  local sum = num > 0 and tokens() or 0 -- if nothing waits, a count that is left over is wrong
  excess = sum + new[2] - max_tokens
  if excess > 0 then
    local mean = (sum + new[2]) / (num + new[1])
    return {'full', work.ms_until_left(math.ceil(excess / mean), tenant), tokens_name, numbers.exact(max_tokens)}
  end
end

local function are_set(added)
  for tenant in pairs(added) do
    for _, name in ipairs({'max_pending', 'max_pending_tokens', 'tenant_max_pending', 'tenant_max_pending_tokens',
      'max_pending:' .. tenant, 'max_pending_tokens:' .. tenant}) do
      if server.config(name) then return true end
    end
  end
end

local function add(sums, tokens) sums[1], sums[2] = sums[1] + 1, sums[2] + tokens end

-- The reply of `enqueue` if a limit has no room for these new requests, else nil. Each has a tenant and tokens.
function backlog_limits.refusal(fresh)
  local added, added_in_all = {}, {0, 0} -- {requests, tokens} for each tenant, and for the whole queue
  for _, request in ipairs(fresh) do
    added[request.tenant] = added[request.tenant] or {0, 0}
    add(added[request.tenant], request.tokens)
    add(added_in_all, request.tokens)
  end
  if #fresh == 0 or not are_set(added) then return nil end
  local full = refusal_by('max_pending', nil, added_in_all, num_waiting_in_all, tokens_in_all)
  for tenant, new in pairs(added) do
    full = full or refusal_by('max_pending:' .. tenant, 'tenant_max_pending', new, function()
      return redis.call('ZCARD', keys.pending_of(tenant)) + counted('delayed:' .. tenant)
    end, function() return counted('tokens:' .. tenant) end, tenant)
  end
  return full
end
