-- uses: keys, numbers, server, requests, scores
-- The queues in which requests wait, and how requests get there and back. For the limits of `enqueue`, a
-- request is counted from the script that sets its state to `waiting` to the script that sets another.

local MAX_HISTORY = 16

local NUM_OF_TENANTS = 'waiting' -- how many requests of tenants with a name wait and are not delayed

local changes = {} -- to the counts of the backlog, by field
local function change_later(field, change) changes[field] = (changes[field] or 0) + change end

function pending.count_later(kind, tenant, change)
  if change == 0 then return end
  tenant = keys.tenant_name(tenant)
  change_later(kind .. ':' .. tenant, change)
  if tenant == '' then return end
  change_later(NUM_OF_TENANTS, ((kind == 'tokens') == (change > 0)) and 1 or -1)
end

server.at_the_end(function()
  for field, change in pairs(changes) do
    local left = change ~= 0 and redis.pcall('HINCRBY', keys.backlog, field, numbers.exact(change))
    if type(left) == 'number' and left <= 0 then redis.call('HDEL', keys.backlog, field) end
  end
  changes = {}
end)

-- Correct the count of tenants' requests by the number of ids in all queues: plain clients and earlier releases do
-- not count theirs.
function pending.recount(num_in_queues)
  local num = num_in_queues - server.size(keys.pending)
  if num > 0 then
    redis.pcall('HSET', keys.backlog, NUM_OF_TENANTS, numbers.exact(num))
  else
    redis.pcall('HDEL', keys.backlog, NUM_OF_TENANTS)
  end
end

-- Count that a request stops waiting. `fields` has its state, tenant and tokens from before.
function pending.leave(id, fields)
  if fields.state ~= 'waiting' then return end
  pending.count_later('tokens', fields.tenant, -numbers.whole(fields.tokens, 0))
  if server.score_in(keys.delayed, id) then pending.count_later('delayed', fields.tenant, -1) end
end

-- Put an id into its tenant's queue, or into plain `pending` if a stranger gave that key another type.
function pending.put(id, score, tenant)
  tenant = keys.tenant_name(tenant)
  local known = tenant ~= '' and redis.pcall('SADD', keys.tenants_waiting, tenant)
  local put = type(known) == 'number' and redis.pcall('ZADD', keys.pending_of(tenant), score, id)
  if type(put) ~= 'number' then redis.call('ZADD', keys.pending, score, id) end
end

-- The keys of all tenants' queues, plain `pending` first.
function pending.queues()
  local found, names = {keys.pending}, redis.pcall('SMEMBERS', keys.tenants_waiting)
  for _, tenant in ipairs(names.err and {} or names) do
    local key = keys.pending_of(tenant)
    if key ~= keys.pending and redis.call('TYPE', key).ok == 'zset' then found[#found + 1] = key end
  end
  return found
end

-- The key of the queue in which an id waits: its tenant's, or another in which a stranger put it; nil if none.
function pending.queue_of(id, tenant)
  local home = keys.pending_of(tenant)
  if server.score_in(home, id) then return home end
  for _, key in ipairs(pending.queues()) do
    if redis.call('ZSCORE', key, id) then return key end
  end
end

-- Move delayed requests whose time has come to pending. Returns how many.
function pending.promote_delayed()
  local ids = server.due(keys.delayed, server.now_text, 100)
  for _, id in ipairs(ids) do
    local fields = requests.read(id, 'score', 'state', 'tenant') or {}
    if fields.state == 'waiting' then pending.count_later('delayed', fields.tenant, -1) end
    pending.put(id, scores.read(fields.score), fields.tenant)
    redis.call('ZREM', keys.delayed, id)
  end
  return #ids
end

-- Note in the request's `history` how its current attempt ended.
function pending.note_end_of_attempt(id, how)
  local fields = requests.read(id, 'history', 'attempt', 'worker', 'claimed_at') or {}
  local parsed, history = pcall(cjson.decode, fields.history or '[]')
  if not parsed or type(history) ~= 'table' or history[1] == nil then history = {} end
  while #history >= MAX_HISTORY do table.remove(history, 1) end
  history[#history + 1] = {
    attempt = numbers.whole(fields.attempt, 0), worker = fields.worker or '',
    claimed_at = numbers.whole(fields.claimed_at, 0), ended_at = server.now, how = how,
  }
  local encoded, text = pcall(cjson.encode, history)
  if encoded then redis.call('HSET', keys.request(id), 'history', text) end
end

-- Return a request, which no worker holds any longer, to its old place; with `delay_ms`, only after this time.
-- `how` says how its attempt ended. If it is nil, the history gets no entry.
function pending.put_back(id, score, how, delay_ms)
  if how then pending.note_end_of_attempt(id, how) end
  local fields = requests.read(id, 'state', 'tenant', 'tokens') or {}
  if fields.state ~= 'waiting' then
    pending.count_later('tokens', fields.tenant, numbers.whole(fields.tokens, 0))
  end
  redis.call('HSET', keys.request(id), 'state', 'waiting')
  redis.call('HDEL', keys.request(id), 'fence', 'worker', 'alone')
  redis.call('ZREM', keys.leases, id)
  server.remove_later(keys.running_of(fields.tenant), id)
  local waits = delay_ms and delay_ms > 0
    and redis.pcall('ZADD', keys.delayed, numbers.exact(server.now + delay_ms), id)
  if type(waits) == 'number' then
    server.remove_later(keys.pending, id) -- a plain client may have put it there again
    server.remove_later(keys.pending_of(fields.tenant), id)
    pending.count_later('delayed', fields.tenant, 1)
  else
    pending.put(id, scores.read(score), fields.tenant)
  end
end
