-- Take requests in, all or none.
-- KEYS  1 pending
-- ARGV  1 idempotency time (ms), then for each request: id, payload, priority, deadline_ms (0: none),
--       delay_ms, idempotency key ('' for none); then the call's nonce, or nothing: a call that is
--       sent again because its reply was lost is known by it
-- Reply {'ok', id, ...}, with the older id where an idempotency key is known
--       {'exists', id}            an id is taken; nothing was enqueued
--       {'full', retry_after_ms}  the queue's max_pending is reached; nothing was enqueued

local idempotency_ms = ARGV[1]
local FIELDS = 6
local count = math.floor((#ARGV - 1) / FIELDS)
local nonce = (#ARGV - 1) % FIELDS == 1 and ARGV[#ARGV] or nil

local function idempotency_key(name) return prefix .. 'idempotency:' .. name end

local ids, fresh, seen = {'ok'}, {}, {}
for n = 0, count - 1 do
  local at = 2 + n * FIELDS
  local id, key = ARGV[at], ARGV[at + 5]
  local known = key ~= '' and (seen[key] or redis.call('GET', idempotency_key(key)))
  if known then
    ids[#ids + 1] = known
  else
    -- A cancel may come before its request: a hash without payload is no request yet.
    local payload = redis.pcall('HEXISTS', request_key(id), 'payload')
    if seen['id ' .. id] then return {'exists', id} end
    if payload == 0 then
      fresh[#fresh + 1] = at
    elseif not nonce or (read_request(id, 'nonce') or {}).nonce ~= nonce then
      return {'exists', id}
    end
    seen['id ' .. id] = true
    if key ~= '' then seen[key] = id end
    ids[#ids + 1] = id
  end
end

-- How long, at the rate of the last finishes, until there is room for all of them.
local function retry_after(excess)
  local finished = read_outputs()
  if #finished < 2 then return 1000 end
  local newest, oldest = finished[1][1], finished[#finished][1]
  return math.max(1, math.ceil(excess * (newest - oldest) / (#finished - 1)))
end

local limit = whole(config('max_pending'), 0)
local excess = redis.call('ZCARD', pending) + redis.call('ZCARD', delayed) + #fresh - limit
if limit > 0 and #fresh > 0 and excess > 0 then return {'full', retry_after(excess)} end

write_needs_memory()
local arrived = {}
for _, at in ipairs(fresh) do
  local id, payload, priority = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
  local deadline_ms, delay_ms, key = tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4]), ARGV[at + 5]
  local score = exact(score_of(priority))
  redis.call('HSET', request_key(id), 'payload', payload, 'state', 'waiting', 'score', score,
    'priority', priority, 'enqueued_at', exact(now), 'nonce', nonce or '')
  redis.call('PERSIST', request_key(id)) -- a cancel that came before gave it an end
  if deadline_ms > 0 then redis.call('ZADD', deadlines, exact(now + deadline_ms), id) end
  if delay_ms > 0 then
    redis.call('ZADD', delayed, exact(now + delay_ms), id)
  else
    arrived[#arrived + 1] = score
    arrived[#arrived + 1] = id
  end
  if key ~= '' then redis.call('SET', idempotency_key(key), id, 'PX', idempotency_ms) end
end
call_for_all('ZADD', pending, arrived)
if #fresh > 0 then wake_workers() end
return ids
