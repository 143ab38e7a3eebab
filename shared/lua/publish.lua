-- Send a whole step: check, append, publish and finish its rows, renew the worker's leases.
-- KEYS  1 pending
-- ARGV  1 lease (ms)          2 number of rows
--       for each row: id, fence, index, end, event JSON, finish reason ('' unless it is the last),
--         result JSON (likewise; '' folds the log)
--       for each id held: id, fence, prompt tokens ('' if told before); an id may be held and have rows
-- Reply {{row status, ...}, {held status, ...}}
--       ok         row written; lease renewed
--       duplicate  the log has it already (a lost reply was retried); nothing was done
--       gap        the log ends before `index`; nothing was done
--       finished   the request has its last event; nothing was done
--       fenced     another attempt holds the request, or nobody; nothing was done
--       cancelled, expired   the request got its last event now, without this row's tokens
-- Statuses of all rows are settled before the first write. A row that cannot be written answers
-- `error <message>` and does not stop the others.

local lease_ms, num_rows = tonumber(ARGV[1]), tonumber(ARGV[2])
local ROW, HELD = 7, 3
local held_from = 3 + num_rows * ROW
local num_held = (#ARGV - held_from + 1) / HELD

local expired = past_deadline()
local known = {} -- id -> what the server says of it, and how far its log will be

-- Where the logs ended after the last publish: one read and one write for all rows instead of a
-- look at each log. Only a cache, of which anything may be missing: whoever ends a request drops
-- it, and so does a step of few rows, for which it does not pay. Should it be outdated after all,
-- XADD refuses the row, as the log is further or gone.
local FEW_ROWS, TOPS_TTL_MS = 4, 60000
local cached_top, new_tops = {}, {}
for from = 1, num_rows > FEW_ROWS and num_rows or 0, 1000 do
  local ids = {}
  for n = from, math.min(from + 999, num_rows) do ids[#ids + 1] = ARGV[3 + (n - 1) * ROW] end
  for i, top in ipairs(redis.call('HMGET', tops, unpack(ids))) do cached_top[ids[i]] = top end
end

-- `index` is given for a row that goes on, which alone may rely on the cache.
local function look_up(id, index)
  local request = known[id]
  if request then return request end
  local fields = redis.pcall('HMGET', request_key(id), 'fence', 'state', 'cancelled')
  local count, ended = index, false
  if not index or cached_top[id] ~= index then count, ended = log_top(id) end
  local finished = ended or is_final(fields[2])
  request = {
    fence = fields[1] or nil, cancelled = fields[3] == '1', count = tonumber(count),
    was_finished = finished, finished = finished,
  }
  known[id] = request
  return request
end

-- What stands in the way of a holder, whatever it wants to do.
local function obstacle(request, id, fence)
  if request.finished then return 'finished' end
  if request.fence ~= fence then return 'fenced' end
  if request.cancelled then return 'cancelled' end
  if expired[id] then return 'expired' end
end

local row_status, held_status = {}, {}
for n = 1, num_rows do
  local at = 3 + (n - 1) * ROW
  local id, index = ARGV[at], tonumber(ARGV[at + 2])
  local goes_on = ARGV[at + 5] == ''
  local request = look_up(id, goes_on and ARGV[at + 2])
  local status = obstacle(request, id, ARGV[at + 1])
  if not status then
    if index < request.count then status = 'duplicate'
    elseif index > request.count then status = 'gap'
    else
      status = 'ok'
      request.count = tonumber(ARGV[at + 3])
      request.finished = not goes_on
    end
  elseif status == 'cancelled' or status == 'expired' then
    request.finished = true
  end
  row_status[n] = status
end
for n = 1, num_held do
  local at = held_from + (n - 1) * HELD
  local id, fence, prompt_tokens = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local request = look_up(id)
  held_status[n] = obstacle(request, id, fence) or 'ok'
  if held_status[n] == 'cancelled' or held_status[n] == 'expired' then request.finished = true end
  if prompt_tokens ~= '' and not request.was_finished and request.fence == fence then
    request.untold = prompt_tokens
  end
end

-- Write the exact length of the prompt, if it came with this call and is not written yet.
local function tell_prompt_tokens(id)
  local request = known[id]
  if request.untold then
    redis.call('HSET', request_key(id), 'prompt_tokens', request.untold)
    request.untold = nil
  end
end

-- Append a row that goes on. Gives its status, which is not ok if the cache was wrong.
local function append(id, index, count, event)
  local added
  if index == '0' then added = redis.pcall('XADD', tokens_key(id), count .. '-0', 'event', event)
  else added = redis.pcall('XADD', tokens_key(id), 'NOMKSTREAM', count .. '-0', 'event', event) end
  if not added then return 'gap' end
  if type(added) ~= 'table' or not added.err then return 'ok' end
  local top, ended = log_top(id)
  if ended then return 'finished' end
  return top > tonumber(index) and 'duplicate' or 'error ' .. tostring(added.err)
end

for n, status in ipairs(row_status) do
  local at = 3 + (n - 1) * ROW
  local id, count, event, reason = ARGV[at], ARGV[at + 3], ARGV[at + 4], ARGV[at + 5]
  local request = known[id]
  if status == 'ok' and request.has_gap then
    row_status[n] = 'gap'
  elseif status == 'ok' and reason ~= '' then
    local result = ARGV[at + 6]
    finish(id, reason, count, event, result ~= '' and result or nil, request.untold)
    request.untold = nil
  elseif status == 'ok' then
    status = append(id, ARGV[at + 2], count, event)
    row_status[n] = status
    if status == 'ok' then
      publish_event(id, event)
      new_tops[#new_tops + 1] = id
      new_tops[#new_tops + 1] = count
    else
      request.has_gap = status == 'gap'
    end
  elseif status == 'cancelled' or status == 'expired' then
    tell_prompt_tokens(id)
    finish_bare(id, status)
  end
end
local expiry, renewed = exact(now + lease_ms), {}
for n, status in ipairs(held_status) do
  local id = ARGV[held_from + (n - 1) * HELD]
  tell_prompt_tokens(id)
  if status == 'ok' then
    renewed[#renewed + 1] = expiry
    renewed[#renewed + 1] = id
  elseif status == 'cancelled' or status == 'expired' then
    finish_bare(id, status)
  end
end
call_for_all('ZADD', leases, renewed)
if #new_tops > 2 * FEW_ROWS then
  call_for_all('HSET', tops, new_tops)
  redis.call('PEXPIRE', tops, TOPS_TTL_MS)
else
  for n = 1, #new_tops, 2 do remove_later(tops, new_tops[n]) end
end
carry_out()
return {row_status, held_status}
