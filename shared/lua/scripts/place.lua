-- uses: keys, numbers, server, requests, scores, work, affinity
-- Look at the place of a request that waits. Changes nothing. The number of commands does not grow with the number of
-- requests and tenants.
-- ARGV  1 id
-- Reply {state}, '' for an unknown request; if the request waits, {'waiting', how many wait in front ('': unknown),
--        1 if that is the most that may run first else 0, how many are expected to run first, tokens of each ('':
--        unknown), time until a delayed request may run (ms), live workers, 1 if the queue is paused else 0, and what
--        workers did in the last minute: requests that ended, dispersion of their number, output tokens, in how many
--        ms}. Numbers with a fraction are text.

local id = ARGV[1]
local fields = requests.read(id, 'state', 'tenant', 'score') or {}
if fields.state == 'active' or requests.is_final(fields.state) then return {fields.state} end

local tenant = keys.tenant_name(fields.tenant)
local home = keys.pending_of(tenant)
local num_of_tenant = server.size(home)
local num_in_front = redis.call('ZRANK', home, id) or nil
local delayed_until = not num_in_front and server.score_in(keys.delayed, id)
if not num_in_front and not delayed_until and redis.pcall('HEXISTS', keys.request(id), 'payload') ~= 1 then
  return {''}
end

local function count(key, highest_score)
  local num = redis.pcall('ZCOUNT', key, '-inf', highest_score)
  return type(num) == 'number' and num or 0
end

-- A claim ends what is past its deadline, and first brings delayed requests to their places.
local num_due, is_most = count(keys.delayed, server.now_text), count(keys.deadlines, server.now_text) > 0
if delayed_until then
  num_in_front, is_most = count(home, scores.read(fields.score)), true
  if delayed_until <= server.now then num_due = num_due - 1 end
end

local counts = redis.pcall('HMGET', keys.backlog, 'waiting', 'tokens:' .. tenant, 'delayed:' .. tenant)
if counts.err then counts = {} end
for nth = 1, 3 do counts[nth] = numbers.whole(counts[nth], 0) end
local num_counted = num_of_tenant + counts[3]
local tokens_of_each = counts[2] > 0 and num_counted > 0 and counts[2] / num_counted

local function has_other_tenants()
  local names = redis.pcall('SRANDMEMBER', keys.tenants_waiting, 3) -- at most '', its own and another one
  for _, name in ipairs(names.err and {} or names) do
    if name ~= '' and name ~= tenant then return true end
  end
  return tenant ~= '' and server.size(keys.pending) > 0
end

-- Among tenants, a claim decides by the service that each has received by then, so all requests of the others may
-- run first. By its share, the tenant gets every n-th turn.
local num_expected = num_in_front
if num_in_front and has_other_tenants() then
  local own_share = work.share_of(tenant)
  num_expected = (num_in_front + 0.5) * own_share - 0.5
  local num_of_others = counts[1]
  if tenant ~= '' then num_of_others = math.max(0, counts[1] - num_of_tenant) + server.size(keys.pending) end
  num_in_front, is_most = num_in_front + num_of_others, true
end
if num_in_front and server.number('affinity_ms', 0) > 0 then
  local num_behind = math.max(0, num_of_tenant - num_in_front - 1)
  num_in_front, is_most = num_in_front + math.min(num_behind, affinity.most_overtaking()), true
end
if num_in_front and num_due > 0 then num_in_front, is_most = num_in_front + num_due, true end

local live = redis.pcall('ZCOUNT', keys.prefix .. 'workers', server.now_text, '+inf')
local num, dispersion, tokens, ms = work.done_lately()
return {
  'waiting', num_in_front or '', is_most and 1 or 0, numbers.precise(math.min(num_expected or 0, num_in_front or 0)),
  tokens_of_each and numbers.precise(tokens_of_each) or '',
  delayed_until and math.max(0, math.ceil(delayed_until - server.now)) or 0,
  type(live) == 'number' and live or 0, server.config('paused') == '1' and 1 or 0,
  numbers.precise(num), numbers.precise(dispersion), numbers.precise(tokens), ms,
}
