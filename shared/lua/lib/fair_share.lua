-- uses: keys, numbers, server, requests, tenants
-- The order in which a claim takes the requests of several tenants.

local MAX_TENANTS = 256 -- the most tenants that one call looks at, which bounds its time

-- The queues of tenants whose requests wait. A claim walks through each: `id` is its current request there, or
-- nil at the end. After the first page, the walk continues at the position `skip`.
local queues, skip = {}, 0
fair_share.is_shared = false

local function read_page(queue, size)
  local page = redis.pcall('ZRANGE', queue.key, queue.seen, queue.seen + size - 1)
  if page.err or #page == 0 then return {}, {} end
  queue.seen = queue.seen + #page
  return page, redis.call('ZMSCORE', queue.key, unpack(page))
end

local function load_page(queue)
  if queue.seen > 0 then queue.seen = math.max(queue.seen, skip) end
  queue.ids, queue.scores = read_page(queue, queue.page)
  queue.at = 1
end

local function look_at_current(queue)
  queue.id, queue.priority = queue.ids[queue.at], nil
  queue.score = queue.id and queue.scores[queue.at]
  if fair_share.is_shared then queue.place = tonumber(queue.score or 0) or 0 end
end

function fair_share.step(queue)
  queue.at = queue.at + 1
  if queue.at > #queue.ids then load_page(queue) end
  look_at_current(queue)
end

-- The next ids of a queue's walk, at most `limit`. The first is the current one.
function fair_share.next_ids(queue, limit)
  if queue.at + limit - 1 > #queue.ids and queue.seen >= skip then
    local ids, scores = read_page(queue, limit)
    for nth, id in ipairs(ids) do
      queue.ids[#queue.ids + 1], queue.scores[#queue.scores + 1] = id, scores[nth]
    end
  end
  return {unpack(queue.ids, queue.at, math.min(queue.at + limit - 1, #queue.ids))}
end

-- Move one of the next requests of a queue's walk before the others. `nth` is 1 for the current one.
function fair_share.bring_forward(queue, nth)
  for _, list in ipairs({queue.ids, queue.scores}) do
    table.insert(list, queue.at, table.remove(list, queue.at + nth - 1))
  end
  look_at_current(queue)
end

local function open(tenant, page)
  local queue = {
    tenant = tenant, key = keys.pending_of(tenant), page = page, ids = {}, at = 0, seen = 0, services = {},
    num_gone = 0, -- how many requests this call takes out of it
    is_left_out = false, -- whether this call takes nothing more of it
  }
  fair_share.step(queue)
  queues[#queues + 1] = queue
end

function fair_share.open_all(skipped)
  skip = math.max(0, skipped)
  local names = redis.pcall('SRANDMEMBER', keys.tenants_waiting, MAX_TENANTS)
  fair_share.is_shared = not names.err and #names > 0
  open('', fair_share.is_shared and 4 or 32)
  for _, tenant in ipairs(fair_share.is_shared and names or {}) do
    if tenant == keys.tenant_name(tenant) then
      if tenant ~= '' then open(tenant, 4) end
    else
      redis.call('SREM', keys.tenants_waiting, tenant) -- no key may have this name
    end
  end
end

local function is_before(one, other)
  return one.place < other.place or one.place == other.place and one.id < other.id
end

-- The priority of a walk's current request.
function fair_share.priority_at(queue)
  if not queue.priority then
    local stored = numbers.whole((requests.read(queue.id, 'priority') or {}).priority)
    local payload = not stored and (requests.read(queue.id, 'payload') or {}).payload
    queue.priority = stored or numbers.in_json(payload or '', 'priority') or 0
  end
  return queue.priority
end

local clocks, served = {}, {} -- by the key of the counters; `served` has the counters to be written

local function clock_of(key)
  clocks[key] = clocks[key] or server.score_in(key, '*') or 0
  return clocks[key]
end

local function service_of(queue, key)
  if not queue.services[key] then
    queue.services[key] = server.score_in(key, queue.tenant) or clock_of(key)
  end
  return queue.services[key]
end

local function may_be_next(queue) return queue.id and not queue.is_left_out end

-- The queue to look at next and, if tenants share, the lowest score of all current requests. The request with
-- this score decides which priority is served. Of the tenants that wait at this priority, the one that received
-- the least service is next.
function fair_share.next_queue()
  if not fair_share.is_shared then return may_be_next(queues[1]) and queues[1] end
  local first
  for _, queue in ipairs(queues) do
    if may_be_next(queue) and (not first or is_before(queue, first)) then first = queue end
  end
  if not first or #queues == 1 then return first, first and first.score end
  local level, best = fair_share.priority_at(first), first
  local key = tenants.counters_of(level)
  for _, queue in ipairs(queues) do
    if may_be_next(queue) and queue ~= best then
      local less = service_of(queue, key) - service_of(best, key)
      if (less < 0 or less == 0 and is_before(queue, best)) and fair_share.priority_at(queue) == level then
        best = queue
      end
    end
  end
  return best, first.score
end

-- Count a prompt as service to its tenant. The clock moves up to what the tenant had received before.
function fair_share.charge(queue, priority, prompt_tokens)
  local key = tenants.counters_of(priority)
  local before = service_of(queue, key)
  local after = before + tenants.PROMPT_WEIGHT * prompt_tokens / tenants.weight_of(queue.tenant)
  served[key] = served[key] or {}
  served[key][queue.tenant], queue.services[key] = after, after
  clocks[key] = math.max(clock_of(key), before)
end

local function waits_at(queue, key)
  return queue and queue.id and tenants.counters_of(fair_share.priority_at(queue)) == key
end

-- Write the counters and the clock of each priority. Remove the counters that the clock has passed, except
-- those of tenants that still wait there: correcting an estimate may have lowered them.
function fair_share.settle()
  for key, services in pairs(served) do
    local changes, by_tenant, most, anyone = {}, {}, 0, false
    for tenant, service in pairs(services) do
      most = math.max(most, service)
      changes[#changes + 1] = numbers.precise(service)
      changes[#changes + 1] = tenant
    end
    for _, queue in ipairs(queues) do
      by_tenant[queue.tenant] = queue
      anyone = anyone or waits_at(queue, key)
    end
    if not anyone then clocks[key] = math.max(clocks[key], most) end -- no tenant waits there
    changes[#changes + 1] = numbers.precise(clocks[key])
    changes[#changes + 1] = '*'
    server.for_all(redis.pcall, 'ZADD', key, changes)
    for _, tenant in ipairs(server.due(key, numbers.precise(clocks[key]), 1000)) do
      if tenant ~= '*' and not waits_at(by_tenant[tenant], key) then server.remove_later(key, tenant) end
    end
    redis.call('PEXPIRE', key, tenants.COUNTERS_TTL_MS)
  end
end

-- The most requests that a walk has passed and left in their queue.
function fair_share.num_passed()
  local most = 0
  for _, queue in ipairs(queues) do
    most = math.max(most, queue.seen - #queue.ids + queue.at - 1 - queue.num_gone)
  end
  return most
end

-- How many requests wait, ended ones that still stand there included.
function fair_share.num_waiting()
  local sum = 0
  for _, queue in ipairs(queues) do sum = sum + server.size(queue.key) end
  return sum
end

-- Returns how many requests wait now. Removes tenants without waiting requests and, once no request waits at
-- all, the counts of the backlog.
function fair_share.count_waiting(num_claims)
  local sum, gone = 0, {}
  for _, queue in ipairs(queues) do
    local count = redis.pcall('ZCARD', queue.key)
    if type(count) == 'number' then sum = sum + count end
    if count == 0 and queue.tenant ~= '' then gone[#gone + 1] = queue.tenant end
  end
  server.for_all(redis.call, 'SREM', keys.tenants_waiting, gone)
  if sum == 0 and num_claims == 0 and #queues <= MAX_TENANTS and redis.pcall('ZCARD', keys.delayed) == 0 then
    redis.call('DEL', keys.backlog)
    if fair_share.is_shared and redis.call('ZCARD', keys.leases) == 0 then
      redis.call('DEL', keys.tenants_waiting)
    end
  elseif fair_share.is_shared then
    redis.call('SADD', keys.tenants_waiting, '') -- from now on the tenant without a name is charged too
  end
  return sum
end
