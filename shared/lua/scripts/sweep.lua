-- uses: keys, numbers, server, pictures, requests, pending, ending, running_limits
-- Remove keys that nothing refers to: a flag for a request that never came, a log without its hash, a hash
-- in no queue, a picture that no request needs. Plain clients leave such keys behind. Each call looks at one page
-- of the server's keys. What it finds is noted, and removed if it is still so after the time for which results are
-- kept, because a client may be in the middle of enqueueing a request with several commands.
-- ARGV  1 cursor: 0 at first, then what the last reply said   2 about how many keys to look at
-- Reply {cursor (0: that was the last page), how many were removed, and the server's message if its access
--       rules do not let this user list the keys}

local cursor, limit = ARGV[1], tonumber(ARGV[2])
local MAX_USERS = 100
local orphans, grace_ms = keys.prefix .. 'orphans', server.number('result_ttl_ms', 3600000)
server.write_needs_no_memory()

-- Whether an id without lease and queue has a key without an expiry. Ended requests do not count: they expire by
-- themselves, and a client may keep a result longer.
local function is_orphan(id)
  local fields = requests.read(id, 'state', 'tenant') or {}
  local stays = redis.call('PTTL', keys.request(id)) == -1 or redis.call('PTTL', keys.tokens(id)) == -1
  return stays and not requests.is_final(fields.state)
    and not (redis.call('ZSCORE', keys.leases, id) or server.score_in(keys.delayed, id))
    and not pending.queue_of(id, fields.tenant)
end

-- A former request gets its last event, because a client may wait for it. Other keys are deleted.
local function let_go(id)
  local fields = requests.read(id, 'state', 'payload', 'cancelled')
  if not fields or not (fields.state or fields.payload) then
    redis.call('DEL', keys.request(id), keys.tokens(id))
    return
  end
  if fields.cancelled == '1' then
    ending.finish_bare(id, 'cancelled')
  else
    ending.finish_bare(id, 'error', 'internal_error', 'request: it was in no queue, and no worker held it')
  end
  for _, key in ipairs({keys.request(id), keys.tokens(id)}) do
    if redis.call('PTTL', key) == -1 then redis.call('PEXPIRE', key, grace_ms) end
  end
end

-- Forget requests that no longer need a picture, such as deleted ones. Looks at MAX_USERS of them.
local function look_after_picture(name)
  local key = pictures.key(name)
  local users = redis.pcall('HRANDFIELD', key, MAX_USERS)
  for _, field in ipairs(users.err and {} or users) do
    local id = string.match(field, '^request:(.*)$')
    local fields = id and requests.read(id, 'state', 'pictures')
    local is_over = fields and requests.is_final(fields.state) and fields.state ~= 'dead'
    if id and (is_over or not (fields and fields.pictures)) then redis.call('HDEL', key, field) end
  end
  if redis.call('PTTL', key) == -1 then pictures.expire_unneeded(name, grace_ms) end
end

local page = redis.pcall('SCAN', cursor, 'MATCH', keys.prefix .. '*', 'COUNT', limit)
if page.err then return {cursor, 0, page.err} end
for _, key in ipairs(page[2]) do
  local kind, id = string.match(string.sub(key, #keys.prefix + 1), '^(%l+):(.*)$')
  if (kind == 'request' or kind == 'tokens') and is_orphan(id) then
    redis.call('ZADD', orphans, 'NX', server.now_text, id)
  elseif kind == 'picture' then
    look_after_picture(id)
  elseif kind == 'tenants' and string.match(id, '^running') then
    running_limits.forget_gone(key)
  elseif kind == 'pending' and id == keys.tenant_name(id) and redis.call('TYPE', key).ok == 'zset' then
    redis.call('SADD', keys.tenants_waiting, id) -- the server may have evicted it
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
