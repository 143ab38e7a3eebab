-- uses: keys, numbers, server, arguments, pictures, requests, pending, backlog_limits, scores, places, shortest_first
-- Enqueue requests, all or none.
-- ARGV by name: idempotency_ms; fields: the names of each request's values, with commas between; nonce, or left
--       out: it identifies a call that is sent again because its reply was lost; pictures, how many pictures come
--       last, or left out; then 'then', and for each request its values. They are id, payload and, as needed,
--       priority, deadline_ms (0: none), delay_ms, idempotency_key ('' for none), tenant ('' for none), account (''
--       for none, else LIMIT HOLDER of the token rate that its output is charged to), forked_from ('' for none, else
--       POSITION ID), pictures (the names, with spaces between, of the pictures that the payload names), by_deadline
--       (1: of such requests, the earliest deadline runs first), deadline_policy (`refuse`: refuse the request if it
--       will probably end after its deadline), affinity (hashes, see docs/protocol.md), expected_tokens (of output,
--       '' if unknown). Then, for each new picture, its name and its data URL
--       By position: 1 idempotency_ms, a space, and how many of these values each request has, in this order (6 if
--       left out); then the values; then the nonce, or nothing
-- Reply {'ok', id, ...}, with the older id where an idempotency key is known
--       {'exists', id}            an id is taken; nothing was enqueued
--       {'full', retry_after_ms, setting, limit}   the limit of this setting is reached;
--                                 nothing was enqueued
--       {'late', id, deadline_ms, values of a quote as in the reply of `place`}   this request would miss its deadline;
--                                 nothing was enqueued
--       An error if no request may have one of the ids; nothing was enqueued

local FIELDS = {
  'id', 'payload', 'priority', 'deadline_ms', 'delay_ms', 'idempotency_key', 'tenant', 'account', 'forked_from',
  'pictures', 'by_deadline', 'deadline_policy', 'affinity', 'expected_tokens',
}
local DEFAULTS = {__index = {
  id = false, payload = false, priority = 0, deadline_ms = 0, delay_ms = 0, idempotency_key = '', tenant = '',
  account = '', forked_from = '', pictures = '', by_deadline = '', deadline_policy = '', affinity = '',
  expected_tokens = '',
}}
local args, start, fields, num_fields
if arguments.are_named then
  args, start = arguments.read({'idempotency_ms', 'fields', 'nonce', 'pictures'}, 2)
  fields = {}
  for name in string.gmatch(args.fields, '[^,]+') do
    if DEFAULTS.__index[name] == nil then arguments.refuse(name, 'a request has no such field', FIELDS) end
    fields[#fields + 1] = name
  end
  num_fields = math.max(1, #fields)
  if args.nonce == '' then args.nonce = nil end
else
  args, start, fields = {}, 2, FIELDS
  args.idempotency_ms, num_fields = string.match(ARGV[1], '^(%d+) ?(%d*)$')
  num_fields = math.max(1, tonumber(num_fields) or 6)
  if (#ARGV - 1) % num_fields == 1 then args.nonce = ARGV[#ARGV] end
end
local nonce = args.nonce
server.read_settings('pubsub', 'strict_priority', 'aging_ms', 'shortest_first_ms', 'max_pending', 'max_pending_tokens',
  'tenant_max_pending', 'tenant_max_pending_tokens', 'max_pending:', 'max_pending_tokens:')

local pictures_from, urls = #ARGV + 1 - 2 * numbers.whole(args.pictures, 0), {}
for at = pictures_from, #ARGV - 1, 2 do urls[ARGV[at]] = ARGV[at + 1] end

local num_read = math.min(num_fields, #fields)
local function request_at(at)
  local request = {}
  for nth = 1, num_read do request[fields[nth]] = ARGV[at + nth - 1] end
  return setmetatable(request, DEFAULTS)
end

local function idempotency_key(name) return keys.prefix .. 'idempotency:' .. name end

-- The id of the request with an idempotency key, as long as the request is kept. A purge may delete it early.
local function known_by(name)
  local id = redis.call('GET', idempotency_key(name))
  return id and redis.pcall('HEXISTS', keys.request(id), 'payload') == 1 and id
end

local ids, fresh, ids_here, keys_here = {'ok'}, {}, {}, {} -- the last two: of this call
for at = start, pictures_from - num_fields, num_fields do
  local request = request_at(at)
  local id, key = request.id, request.idempotency_key
  local wrong = requests.wrong_id(id)
  if wrong then return redis.error_reply('ERR ' .. wrong) end
  local known = key ~= '' and (keys_here[key] or known_by(key))
  ids[#ids + 1] = known or id
  if not known then
    -- A cancel may come before its request, so a hash without a payload is no request yet, unless its
    -- state is final: then an id that waited without a payload was ended.
    local stored = requests.read(id, 'payload', 'state', 'nonce')
    if ids_here[id] then return {'exists', id} end
    if stored and not stored.payload and not requests.is_final(stored.state) then
      request.tenant, request.tokens = keys.tenant_name(request.tenant), requests.estimated_tokens(request.payload)
      fresh[#fresh + 1] = request
    elseif not nonce or (stored or {}).nonce ~= nonce then
      return {'exists', id}
    end
    ids_here[id] = true
    if key ~= '' then keys_here[key] = id end
  end
end

local full = backlog_limits.refusal(fresh)
if full then return full end

local has_shortest_first = server.number('shortest_first_ms', 0) > 0
for nth, request in ipairs(fresh) do
  local deadline_ms, may_refuse = tonumber(request.deadline_ms), request.deadline_policy == 'refuse'
  local max_output = (may_refuse or has_shortest_first) and requests.requested_output(request.payload) or nil
  local by_deadline_ms = request.by_deadline == '1' and deadline_ms or 0
  local priority, score = tonumber(request.priority), nil
  if has_shortest_first then
    request.guess = shortest_first.guess(request.expected_tokens, max_output)
    score = shortest_first.at_arrival(priority, by_deadline_ms, request.guess, max_output)
  else
    score = scores.at_arrival(priority, by_deadline_ms)
  end
  request.score = numbers.exact(score)
  if may_refuse and deadline_ms > 0 then
    local quote = places.before_arrival(request.tenant, request.score, nth - 1, tonumber(request.delay_ms),
      max_output or math.huge, request.guess)
    local end_p50_ms = tonumber(quote[15]) or 0
    if end_p50_ms > deadline_ms then return {'late', request.id, request.deadline_ms, unpack(quote)} end
  end
end

server.write_needs_memory()
-- If one of these keys has another type, this fails before anything is enqueued.
for _, key in ipairs({keys.deadlines, keys.delayed}) do redis.call('ZREM', key, '') end
local arrived = {}
for _, request in ipairs(fresh) do
  local id, tenant, score, priority = request.id, request.tenant, request.score, tonumber(request.priority)
  local deadline_ms, delay_ms = tonumber(request.deadline_ms), tonumber(request.delay_ms)
  redis.call('HSET', keys.request(id), 'payload', request.payload, 'state', 'waiting', 'score', score,
    'priority', priority, 'enqueued_at', server.now_text, 'tokens', numbers.exact(request.tokens),
    'nonce', nonce or '')
  redis.call('PERSIST', keys.request(id)) -- an earlier cancel may have set an expiry
  if tenant ~= '' then redis.call('HSET', keys.request(id), 'tenant', tenant) end
  if request.guess then
    redis.call('HSET', keys.request(id), 'expected_tokens', numbers.exact(request.guess))
  end
  if request.account ~= '' then redis.call('HSET', keys.request(id), 'account', request.account) end
  if request.affinity ~= '' then redis.call('HSET', keys.request(id), 'affinity', request.affinity) end
  if request.forked_from ~= '' then
    redis.call('HSET', keys.request(id), 'forked_from', request.forked_from)
  end
  if request.pictures ~= '' then
    redis.call('HSET', keys.request(id), 'pictures', request.pictures)
    pictures.keep(id, request.pictures, urls)
  end
  pending.count_later('tokens', tenant, request.tokens)
  if deadline_ms > 0 then
    redis.call('ZADD', keys.deadlines, numbers.exact(server.now + deadline_ms), id)
  end
  if delay_ms > 0 then
    redis.call('ZADD', keys.delayed, numbers.exact(server.now + delay_ms), id)
    pending.count_later('delayed', tenant, 1)
  elseif tenant == '' then
    arrived[#arrived + 1] = score
    arrived[#arrived + 1] = id
  else
    pending.put(id, score, tenant)
  end
  if request.idempotency_key ~= '' then
    redis.call('SET', idempotency_key(request.idempotency_key), id, 'PX', args.idempotency_ms)
  end
end
server.for_all(redis.call, 'ZADD', keys.pending, arrived)
server.carry_out()
if #fresh > 0 then
  server.wake_workers()
elseif ids[2] then
  -- WAIT after a repeated call must count the replicas that have the first call, but it only knows the writes of its
  -- own connection. So this is a write too, which changes nothing.
  local known = keys.request(ids[2])
  redis.call('HSET', known, 'nonce', redis.call('HGET', known, 'nonce') or '')
end
return ids
