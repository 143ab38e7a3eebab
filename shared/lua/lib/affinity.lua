-- uses: keys, numbers, server, requests, scores, fair_share
-- A worker claims first the requests whose beginning it computed lately, because its cache may still hold that. Only
-- the order within a tenant's turn and one priority changes. Among requests of which the worker holds equally much, the
-- session that began first comes first. Off unless the queue's setting `affinity_ms` is above 0.

local LOOK_AHEAD = 64       -- requests compared for one turn
local MAX_WAIT_MS = 10000   -- the highest `affinity_ms`
local HOLDER_MS = 120000    -- how long a claim is remembered
local HELD_MS = 10000       -- how long the size of a claim is remembered: as long as a report
local MAX_HOLDERS = 4       -- workers remembered for one beginning, the last first
local MAX_PREFIXES = 4
local SESSION = MAX_PREFIXES + 1 -- index of its key among a request's
local MAX_LENGTH = 100      -- characters of all hashes of a request
local MAX_LOOKED_UP = 64    -- workers whose reports one call reads

affinity.has_left_some = false
local worker, wait_ms

local function holder_key(tenant, hash) return keys.prefix .. 'holder:' .. tenant .. ':' .. hash end

-- The key of the time of a worker's last claim, and how many requests it held then. No tenant has this name.
local function held_key(id) return holder_key('@worker', id) end

-- Users of earlier releases may not use these keys.
local function may_use_keys()
  local key, check = holder_key('', ''), redis.acl_check_cmd
  return not check or check('MGET', key) and check('SET', key, '')
end

-- Returns whether the worker may claim in another order.
function affinity.turn_on(worker_id, ms)
  worker, wait_ms = worker_id, math.min(ms, MAX_WAIT_MS)
  return string.find(worker_id, '^[^%s@]%S*$') and may_use_keys()
end

-- A request that waits. `holders` has the keys of its prefixes, the longest last, and then that of its session. No
-- request overtakes one that is `fixed`: it has no stored priority, ran before, did not fit, or was overtaken enough.
local entries = {}
local function entry_of(id, tenant)
  local entry = entries[id]
  if entry then return entry end
  local fields = requests.read(id, 'affinity', 'priority', 'attempt', 'passed', 'suspect', 'left_at', 'overtaken',
    'enqueued_at') or {}
  entry = {
    id = id, priority = numbers.whole(fields.priority), left_at = numbers.whole(fields.left_at),
    overtaken = numbers.whole(fields.overtaken, 0), holders = {}, num_prefixes = 0,
    enqueued_at = numbers.whole(fields.enqueued_at, server.now),
  }
  entry.is_fixed = not entry.priority or fields.attempt or fields.passed or fields.suspect
  local hashes = fields.affinity or ''
  local session, prefixes = string.match(#hashes <= MAX_LENGTH and hashes or '', '^([%x%-]+)([ %x]*)$')
  for hash in string.gmatch(prefixes or '', '%x+') do
    if #hash == 16 and entry.num_prefixes < MAX_PREFIXES then
      entry.num_prefixes = entry.num_prefixes + 1
      entry.holders[entry.num_prefixes] = holder_key(tenant, hash)
    end
  end
  if session and #session == 16 then entry.holders[SESSION] = holder_key(tenant, session) end
  entries[id] = entry
  return entry
end

local lists = {} -- by key: the ids of its workers
local begins = {} -- by key of a session: when its first request came. The key's value ends with an @ and this time
local function read_lists(window)
  local unread = {}
  for _, entry in ipairs(window) do
    for _, key in pairs(entry.holders) do
      if not lists[key] then lists[key], unread[#unread + 1] = {}, key end
    end
  end
  local values = #unread > 0 and redis.call('MGET', unpack(unread)) or {}
  for nth, key in ipairs(unread) do
    for word in string.gmatch(values[nth] or '', '%S+') do
      local begin = string.match(word, '^@(%d+)$')
      if begin then begins[key] = tonumber(begin) else lists[key][#lists[key] + 1] = word end
    end
  end
end

-- Whether a worker runs and has a free slot, by its last claim or its last report, whichever came later. A session's
-- worker may be full: while it is, other workers would compute the whole session again, and evict other sessions.
local runs, rooms, num_looked_up = {}, {}, 0
local function may_take(id, is_session)
  if runs[id] == nil and num_looked_up < MAX_LOOKED_UP then
    num_looked_up = num_looked_up + 1
    local report = redis.pcall('HMGET', keys.prefix .. 'worker:' .. id, 'state', 'max_num_seqs', 'heartbeat_at',
      'num_running', 'num_waiting', 'num_prefetched')
    local num_held, last_claim = 0, redis.pcall('GET', held_key(id))
    for nth = 4, 6 do num_held = num_held + numbers.whole(report[nth], 0) end
    local at, num_then = string.match(type(last_claim) == 'string' and last_claim or '', '^(%d+) (%d+)$')
    if at and tonumber(at) > numbers.whole(report[3], 0) then num_held = tonumber(num_then) end
    runs[id] = report[1] == 'running'
    rooms[id] = runs[id] and num_held < numbers.whole(report[2], 0)
  end
  return is_session and runs[id] or rooms[id] or false
end

local function holds(holders)
  for _, id in ipairs(holders) do
    if id == worker then return true end
  end
  return false
end

-- How much of a request this worker holds: nothing (0), a prefix (1 to 4) or its session (5). The second result is
-- whether the worker leaves the request to another one, which may take it and holds more: its session or longest prefix.
local NOBODY = {}
local function look_at(entry)
  if not next(entry.holders) then return 0, false end
  local may_leave = not entry.is_fixed and (not entry.left_at or server.now - entry.left_at < wait_ms)
  for worth = SESSION, 1, -1 do
    local holders = lists[entry.holders[worth]] or NOBODY
    if holds(holders) then return worth, false end
    if may_leave and worth >= entry.num_prefixes then
      for _, id in ipairs(holders) do
        if may_take(id, worth == SESSION) then return 0, true end
      end
    end
  end
  return 0, false
end

-- The next requests of a walk that may be taken out of order: all have the priority of the first.
local function window_of(queue)
  local window = {}
  for nth, id in ipairs(fair_share.next_ids(queue, LOOK_AHEAD)) do
    local entry = entry_of(id, queue.tenant)
    if nth > 1 and entry.priority ~= window[1].priority then break end
    window[nth] = entry
    if entry.is_fixed or entry.overtaken >= scores.most_overtaking() then break end
  end
  read_lists(window)
  return window
end

-- Bring a request to the front of a queue's walk. Returns false if the worker leaves all that it may take.
function affinity.choose(queue)
  local window, best, most, earliest, left = window_of(queue), nil, -1, math.huge, {}
  for nth, entry in ipairs(window) do
    local worth, is_left = look_at(entry)
    local begin = begins[entry.holders[SESSION]] or math.huge
    if entry.is_fixed and nth > 1 then worth, begin = 0, math.huge end
    if is_left and entry.overtaken < scores.most_overtaking() then
      left[#left + 1] = entry
    elseif worth > most or worth == most and begin < earliest then
      best, most, earliest = nth, worth, begin
    end
  end
  if most <= 0 then
    for _, entry in ipairs(left) do
      if not entry.left_at then
        entry.left_at = server.now
        redis.call('HSET', keys.request(entry.id), 'left_at', server.now_text)
      end
    end
    affinity.has_left_some = affinity.has_left_some or #left > 0
  end
  if not best then return false end
  queue.overtaken = {unpack(window, 1, best - 1)}
  fair_share.bring_forward(queue, best)
  return true
end

function affinity.note_held(num)
  redis.call('SET', held_key(worker), server.now_text .. ' ' .. num, 'PX', HELD_MS)
end

local claimed, changed = {}, {} -- keys of holders, and requests that others overtook

-- The outcome of affinity for a request, as words: `held` if this worker, or `missed` if only other workers claimed its
-- session or, if nobody did, its longest claimed beginning; `left` if workers first left the request to others.
local function outcome_of(entry)
  local words = {entry.left_at and 'left'}
  for worth = SESSION, 1, -1 do
    local holders = lists[entry.holders[worth]] or NOBODY
    if #holders > 0 then
      words[#words + 1] = holds(holders) and 'held' or 'missed'
      break
    end
  end
  return table.concat(words, ' ')
end

-- Note that the worker takes the request that `choose` has brought to the front. Returns what affinity did for it.
function affinity.note_claim(queue)
  local entry = entries[queue.id]
  local outcome = outcome_of(entry)
  entry.is_claimed = true
  local session = entry.holders[SESSION]
  if session then begins[session] = math.max(0, math.min(begins[session] or server.now, entry.enqueued_at)) end
  for _, key in pairs(entry.holders) do
    local others = {worker}
    for _, id in ipairs(lists[key] or {}) do
      if id ~= worker and #others < MAX_HOLDERS then others[#others + 1] = id end
    end
    lists[key], claimed[key] = others, true
  end
  for _, each in ipairs(queue.overtaken) do
    each.overtaken, changed[each] = each.overtaken + 1, true
  end
  return outcome
end

server.at_the_end(function()
  for key in pairs(claimed) do
    local begin = begins[key] and ' @' .. numbers.exact(begins[key]) or ''
    redis.call('SET', key, table.concat(lists[key], ' ') .. begin, 'PX', HOLDER_MS)
  end
  for entry in pairs(changed) do
    if not entry.is_claimed then redis.call('HSET', keys.request(entry.id), 'overtaken', entry.overtaken) end
  end
  claimed, changed = {}, {}
end)
