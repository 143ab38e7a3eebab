-- uses: keys, numbers, server, requests, waiting, ending
-- Let go of what nothing refers to: a flag for a request that never came, a log without its hash, a hash
-- in no queue. Plain clients leave such things behind. Looks at a page of the server's keys at a time.
-- What is found is noted, and let go if it is still so when as long has passed as results are kept: who
-- puts a request in by several commands may be in between.
-- ARGV  1 cursor: 0 at first, then what the last reply said   2 about how many keys to look at
-- Reply {cursor (0: that was the last page), how many were let go, and if the server's access rules do
--       not let this user see what keys there are, how the server says so}

local cursor, limit = ARGV[1], tonumber(ARGV[2])
local orphans, grace_ms = keys.prefix .. 'orphans', server.number('result_ttl_ms', 3600000)
server.write_needs_no_memory()

-- Whether something is kept for ever of an id that nobody holds and that stands in no queue. What has
-- ended expires by itself; whoever keeps a result longer may do so.
local function is_orphan(id)
  local fields = requests.read(id, 'state', 'tenant') or {}
  local stays = redis.call('PTTL', keys.request(id)) == -1 or redis.call('PTTL', keys.tokens(id)) == -1
  return stays and not requests.is_final(fields.state)
    and not (redis.call('ZSCORE', keys.leases, id) or server.score_in(keys.delayed, id))
    and not waiting.queue_of(id, fields.tenant)
end

-- What was once a request gets its last event, for those who may wait for it.
local function let_go(id)
  local fields = requests.read(id, 'state', 'payload', 'cancelled')
  if not fields or not (fields.state or fields.payload) then
    redis.call('DEL', keys.request(id), keys.tokens(id))
    return
  end
  if fields.cancelled == '1' then
    ending.finish_bare(id, 'cancelled')
  else
    ending.finish_bare(id, 'error', 'internal_error', 'request: it stood in no queue, and nobody held it')
  end
  for _, key in ipairs({keys.request(id), keys.tokens(id)}) do
    if redis.call('PTTL', key) == -1 then redis.call('PEXPIRE', key, grace_ms) end
  end
end

local page = redis.pcall('SCAN', cursor, 'MATCH', keys.prefix .. '*', 'COUNT', limit)
if page.err then return {cursor, 0, page.err} end
for _, key in ipairs(page[2]) do
  local kind, id = string.match(string.sub(key, #keys.prefix + 1), '^(%l+):(.*)$')
  if (kind == 'request' or kind == 'tokens') and is_orphan(id) then
    redis.call('ZADD', orphans, 'NX', server.now_text, id)
  end
end
local num_gone = 0
for _, id in ipairs(server.due(orphans, numbers.exact(server.now - grace_ms), limit)) do
  if is_orphan(id) then
    let_go(id)
    num_gone = num_gone + 1
  end
  redis.call('ZREM', orphans, id)
end
server.carry_out()
return {page[1], num_gone}
