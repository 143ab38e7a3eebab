-- uses: keys, numbers, server, arguments
-- Store a response of the HTTP API, add its result, or delete it. Count what its tenant stores.
-- ARGV by name, or by position: 1 what: 'add', 'end' or 'forget'   2 tenant, '' without a name   3 id
--       4 added: bytes that this adds   5 ttl_ms: for how long it is kept
--       6 most: responses of the tenant, 0 for any   7 most_bytes, likewise
--       by name the word 'then'; then pairs: field, value
-- Reply {'ok'}; {'gone'} if there is no such response, or for 'end' if it has its result already;
--       {'full', 'number' or 'bytes', how much the tenant stores} if the tenant has reached a limit
-- `responses:of:TENANT` has the tenant's ids by the time at which they expire, `responses:sizes:TENANT` the
-- bytes of each and their `total`. Redis deletes expired responses itself, so they are uncounted here.

local args, rest = arguments.read({'what', 'tenant', 'id', 'added', 'ttl_ms', 'most', 'most_bytes'}, 1)
local what, tenant, id, added = args.what, args.tenant or '', args.id, tonumber(args.added)
local ttl, most, most_bytes = tonumber(args.ttl_ms), tonumber(args.most), tonumber(args.most_bytes)
local record, unfinished = keys.prefix .. 'response:' .. id, keys.prefix .. 'responses:unfinished'
local own, sizes = keys.prefix .. 'responses:of:' .. tenant, keys.prefix .. 'responses:sizes:' .. tenant
local PRUNED = 100

local function count(of, bytes)
  redis.call('HINCRBY', sizes, of, bytes)
  redis.call('HINCRBY', sizes, 'total', bytes)
end

local function uncount(of)
  local size = numbers.whole(redis.call('HGET', sizes, of), 0)
  if redis.call('ZREM', own, of) == 1 and redis.call('HDEL', sizes, of) == 1 then
    redis.call('HINCRBY', sizes, 'total', -size)
  end
end

local function write()
  if #ARGV >= rest then redis.call('HSET', record, unpack(ARGV, rest)) end
end

if what == 'add' then
  server.write_needs_memory()
  server.reset_if_not('zset', own)
  server.reset_if_not('hash', sizes)
  server.reset_if_not('zset', unfinished)
  for _, expired in ipairs(server.due(own, server.now_text, PRUNED)) do uncount(expired) end
  local number, bytes = redis.call('ZCARD', own), numbers.whole(redis.call('HGET', sizes, 'total'), 0)
  if most > 0 and number + 1 > most then return {'full', 'number', number} end
  if most_bytes > 0 and bytes + added > most_bytes then return {'full', 'bytes', bytes} end
  write()
  redis.call('ZADD', own, numbers.exact(server.now + ttl), id)
  redis.pcall('ZADD', unfinished, server.now_text, id)
  count(id, added)
  for _, key in ipairs({record, own, sizes, unfinished}) do redis.call('PEXPIRE', key, ttl) end
  return {'ok'}
elseif what == 'end' then
  server.write_needs_no_memory()
  redis.pcall('ZREM', unfinished, id)
  if redis.call('EXISTS', record) == 0 or redis.call('HEXISTS', record, 'result') == 1 then return {'gone'} end
  write()
  count(id, added)
  return {'ok'}
end
server.write_needs_no_memory()
redis.pcall('ZREM', unfinished, id)
local known = redis.call('DEL', record)
uncount(id)
return {known == 1 and 'ok' or 'gone'}
