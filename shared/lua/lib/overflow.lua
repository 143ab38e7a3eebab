-- uses: keys, numbers, server, requests, pending, rate_buckets, work
-- Overflow workers take only requests that the queue's other workers would finish too late. The request stays in
-- this queue, with its lease and its log.

local MAX_EXAMINED = 512 -- requests with a deadline, which bounds the time of one call
local KEY, MINUTE = rate_buckets.key(':overflow'), rate_buckets.MINUTE -- no API key has this name
local LIMITS = {
  {setting = 'overflow_tokens_per_minute', field = 'tokens', ms = MINUTE},
  {setting = 'overflow_tokens_per_day', field = 'tokens_of_day', ms = 1440 * MINUTE},
}

-- Requests with a deadline that has not passed, but would if they waited until the end of the queue; the nearest
-- first. `margin` (ms) is the time that an overflow worker needs.
local function near_deadlines(margin)
  local longest = 0
  for _, key in ipairs(pending.queues()) do
    local num_before = server.size(key) - 1
    longest = math.max(longest, work.ms_until_end(num_before, string.sub(key, #keys.pending + 2)))
  end
  local ids = redis.pcall('ZRANGE', keys.deadlines, '(' .. server.now_text,
    numbers.exact(server.now + margin + longest), 'BYSCORE', 'LIMIT', 0, MAX_EXAMINED)
  return ids.err and {} or ids
end

-- Iterates over waiting requests that would miss their deadline, in the form of `fair_share`'s queues. The caller
-- removes a request at once, so that those behind it move up.
function overflow.walk()
  local margin, by_tenant, nth = numbers.whole(server.config('overflow_ms')), {}, 0
  local ids = margin and near_deadlines(margin) or {}
  local leases = #ids > 0 and redis.call('ZMSCORE', keys.leases, unpack(ids))
  local function next_late()
    nth = nth + 1
    local id = ids[nth]
    if not id then return nil end
    local fields = not leases[nth] and requests.read(id, 'tenant', 'suspect', 'needs')
    if not fields or fields.suspect or string.find(fields.needs or '', 'overflow', 1, true) then return next_late() end
    local tenant = keys.tenant_name(fields.tenant)
    local key = keys.pending_of(tenant)
    local num_before = redis.pcall('ZRANK', key, id)
    if type(num_before) ~= 'number' then return next_late() end
    local end_at = server.now + margin + work.ms_until_end(num_before, tenant)
    if end_at <= (server.score_in(keys.deadlines, id) or math.huge) then return next_late() end
    by_tenant[tenant] = by_tenant[tenant] or {tenant = tenant, key = key, services = {}}
    local queue = by_tenant[tenant]
    queue.id, queue.score, queue.priority = id, redis.call('ZSCORE', key, id), nil
    return queue
  end
  return next_late
end

-- Take a request's tokens from the limits of all overflow workers. Returns whether there is room, and whether the
-- request allows it: if `is_foreign`, no other worker could continue its stream exactly.
function overflow.take(payload, tokens, is_foreign)
  if is_foreign and string.find(payload, '"exact_only"', 1, true) then return false end
  local full_at = {}
  for _, limit in ipairs(LIMITS) do
    local most = server.number(limit.setting, 0)
    if most > 0 then
      local before = rate_buckets.full_at(KEY, limit.field)
      full_at[limit.field] = rate_buckets.full_after(before, tokens * limit.ms / MINUTE, most)
      if full_at[limit.field] > server.now + limit.ms then return false end
    end
  end
  for field, at in pairs(full_at) do rate_buckets.set_full_at(redis.pcall, KEY, field, at) end
  return true
end
