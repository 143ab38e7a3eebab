-- uses: keys, numbers, server, requests, scores, waiting, backlog_limits
-- Enqueue requests, all or none.
-- ARGV  1 idempotency time (ms), then a space and how many arguments each request has (6 if left out)
--       then for each request: id, payload, priority, deadline_ms (0: none), delay_ms,
--       idempotency key ('' for none), tenant ('' for none), account ('' for none, else LIMIT HOLDER of
--       the token rate that its output is charged to), forked_from ('' for none, else POSITION ID)
--       then the call's nonce, or nothing. It identifies a call that is sent again because its reply was
--       lost
-- Reply {'ok', id, ...}, with the older id where an idempotency key is known
--       {'exists', id}            an id is taken; nothing was enqueued
--       {'full', retry_after_ms, setting, limit}   the limit of this setting is reached;
--                                 nothing was enqueued
--       An error if no request may have one of the ids; nothing was enqueued

local idempotency_ms, num_fields = string.match(ARGV[1], '^(%d+) ?(%d*)$')
num_fields = tonumber(num_fields) or 6
local count = math.floor((#ARGV - 1) / num_fields)
local nonce = (#ARGV - 1) % num_fields == 1 and ARGV[#ARGV] or nil

local function idempotency_key(name) return keys.prefix .. 'idempotency:' .. name end

-- The id that an idempotency key stands for, as long as the request is kept. A purge may delete it early.
local function known_by(name)
  local id = redis.call('GET', idempotency_key(name))
  return id and redis.pcall('HEXISTS', keys.request(id), 'payload') == 1 and id
end

local ids, fresh, ids_here, keys_here = {'ok'}, {}, {}, {} -- the last two: of this call
for n = 0, count - 1 do
  local at = 2 + n * num_fields
  local id, key = ARGV[at], ARGV[at + 5]
  local wrong = requests.wrong_id(id)
  if wrong then return redis.error_reply('ERR ' .. wrong) end
  local known = key ~= '' and (keys_here[key] or known_by(key))
  ids[#ids + 1] = known or id
  if not known then
    -- A cancel may come before its request, so a hash without a payload is no request yet, unless its
    -- state is final: then an id that waited without a payload was ended.
    local fields = requests.read(id, 'payload', 'state', 'nonce')
    if ids_here[id] then return {'exists', id} end
    if fields and not fields.payload and not requests.is_final(fields.state) then
      fresh[#fresh + 1] = {
        id = id, payload = ARGV[at + 1], priority = tonumber(ARGV[at + 2]),
        deadline_ms = tonumber(ARGV[at + 3]), delay_ms = tonumber(ARGV[at + 4]), key = key,
        tenant = keys.tenant_name(num_fields > 6 and ARGV[at + 6]),
        account = num_fields > 7 and ARGV[at + 7] or '', tokens = requests.estimated_tokens(ARGV[at + 1]),
        forked_from = num_fields > 8 and ARGV[at + 8] or '',
      }
    elseif not nonce or (fields or {}).nonce ~= nonce then
      return {'exists', id}
    end
    ids_here[id] = true
    if key ~= '' then keys_here[key] = id end
  end
end

local full = backlog_limits.refusal(fresh)
if full then return full end

server.write_needs_memory()
-- If one of these keys has another type, this fails before anything is enqueued.
for _, key in ipairs({keys.deadlines, keys.delayed}) do redis.call('ZREM', key, '') end
local arrived = {}
for _, request in ipairs(fresh) do
  local id, tenant = request.id, request.tenant
  local score = numbers.exact(scores.at_arrival(request.priority))
  redis.call('HSET', keys.request(id), 'payload', request.payload, 'state', 'waiting', 'score', score,
    'priority', request.priority, 'enqueued_at', server.now_text, 'tokens', numbers.exact(request.tokens),
    'nonce', nonce or '')
  redis.call('PERSIST', keys.request(id)) -- an earlier cancel may have set an expiry
  if tenant ~= '' then redis.call('HSET', keys.request(id), 'tenant', tenant) end
  if request.account ~= '' then redis.call('HSET', keys.request(id), 'account', request.account) end
  if request.forked_from ~= '' then
    redis.call('HSET', keys.request(id), 'forked_from', request.forked_from)
  end
  waiting.count_later('tokens', tenant, request.tokens)
  if request.deadline_ms > 0 then
    redis.call('ZADD', keys.deadlines, numbers.exact(server.now + request.deadline_ms), id)
  end
  if request.delay_ms > 0 then
    redis.call('ZADD', keys.delayed, numbers.exact(server.now + request.delay_ms), id)
    waiting.count_later('delayed', tenant, 1)
  elseif tenant == '' then
    arrived[#arrived + 1] = score
    arrived[#arrived + 1] = id
  else
    waiting.put(id, score, tenant)
  end
  if request.key ~= '' then redis.call('SET', idempotency_key(request.key), id, 'PX', idempotency_ms) end
end
server.for_all(redis.call, 'ZADD', keys.pending, arrived)
server.carry_out()
if #fresh > 0 then server.wake_workers() end
return ids
