-- uses: keys, numbers, server, requests, tenants, ending, rate_buckets
-- Publish a whole step: check, append, publish and finish its rows, and renew the worker's leases.
-- ARGV  1 lease (ms)          2 number of rows
--       for each row: id, fence, index, end, event JSON, finish reason ('' unless it is the last),
--         result JSON (likewise; '' folds the log)
--       for each held id: id, fence, prompt tokens ('' if sent before); a held id may also have rows
-- Reply {{row status, ...}, {held status, ...}}
--       ok         row written; lease renewed
--       duplicate  the log has it already (a lost reply was retried); nothing was done
--       gap        the log ends before `index`; nothing was done
--       finished   the request has its last event; nothing was done
--       fenced     another attempt or nobody holds the request; nothing was done
--       cancelled, expired   the request got its last event now, without this row's tokens
-- The statuses of all rows are decided before the first write. If the log does not accept a row, the row's
-- status is `error <message>` and its request ends, because nobody could continue it. Other rows go on.

local lease_ms, num_rows = tonumber(ARGV[1]), tonumber(ARGV[2])
server.write_needs_no_memory()
local ROW, HELD = 7, 3
local held_from = 3 + num_rows * ROW
local num_held = (#ARGV - held_from + 1) / HELD

local has_tenants = redis.call('EXISTS', keys.tenants_waiting) == 1 -- exists until nothing waits or runs
local known = {} -- id -> what is stored of it, and how many tokens its log will have

local function look_up(id)
  if not known[id] then
    local fields = requests.read(id, 'fence', 'state', 'cancelled', 'account', 'webhook', 'pictures', 'expected_tokens',
      unpack(has_tenants and {'tenant'} or {})) or {}
    local count, ended = requests.log_top(id)
    local finished = ended or requests.is_final(fields.state)
    known[id] = {
      fence = fields.fence, cancelled = fields.cancelled == '1', count = count,
      was_finished = finished, finished = finished, tenant = fields.tenant,
      account = fields.account, webhook = fields.webhook, pictures = fields.pictures,
      expected_tokens = fields.expected_tokens,
      expired = requests.is_past_deadline(id),
    }
  end
  return known[id]
end

-- Why a holder may not continue a request, or nil if it may.
local function obstacle(id, fence)
  local request = look_up(id)
  if request.finished then return 'finished' end
  if request.fence ~= fence then return 'fenced' end
  if not (request.cancelled or request.expired) then return nil end
  request.finished = true -- this call ends it
  return request.cancelled and 'cancelled' or 'expired'
end

local row_status, held_status = {}, {}
for n = 1, num_rows do
  local at = 3 + (n - 1) * ROW
  local id, index = ARGV[at], tonumber(ARGV[at + 2])
  local request = look_up(id)
  local status = obstacle(id, ARGV[at + 1])
  if not status and index ~= request.count then
    status = index < request.count and 'duplicate' or 'gap'
  elseif not status then
    status, request.count, request.finished = 'ok', tonumber(ARGV[at + 3]), ARGV[at + 5] ~= ''
  end
  row_status[n] = status
end
for n = 1, num_held do
  local at = held_from + (n - 1) * HELD
  local id, fence, prompt_tokens = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  held_status[n] = obstacle(id, fence) or 'ok'
  local request = known[id]
  if prompt_tokens ~= '' and not request.was_finished and request.fence == fence then
    request.unwritten = prompt_tokens
  end
end

local function priority_of(id) return (requests.read(id, 'priority') or {}).priority end

-- Write the exact length of the prompt, if it came with this call and is not written yet.
local function note_prompt(id)
  local request = known[id]
  if request.unwritten then
    tenants.note_prompt_tokens(id, request.unwritten, request.tenant, request.tenant and priority_of(id))
    request.unwritten = nil
  end
end

local accounts = {} -- tokens to be charged, by the request's field `account`

-- Count a row's tokens as service to its tenant, and charge them to the account that pays for them.
local function charge_row(id, index, count)
  local tokens, request = tonumber(count) - tonumber(index), known[id]
  if request.account then accounts[request.account] = (accounts[request.account] or 0) + tokens end
  if not request.tenant then return end
  local service = tenants.OUTPUT_WEIGHT * tokens
  tenants.charge_later(request.tenant, numbers.whole(priority_of(id), 0), service)
end

-- Charge the accounts' buckets. This may overdraw a bucket, because no stream is cut off for its rate.
local function charge_accounts()
  for account, tokens in pairs(accounts) do
    local limit, holder = string.match(account, '^(%d+) ([%w_.%-:]+)$')
    limit = numbers.whole(limit, 0)
    if limit > 0 then
      local key = rate_buckets.key(holder)
      local full_at = rate_buckets.full_after(rate_buckets.full_at(key, 'tokens'), tokens, limit)
      rate_buckets.set_full_at(redis.pcall, key, 'tokens', full_at)
    end
  end
end

-- Note when a request got its first token. That happens once in its life.
local function note_first_token(id, at)
  if ARGV[at + 2] == '0' and ARGV[at + 3] ~= '0' then
    redis.pcall('HSET', keys.request(id), 'first_token_at', server.now_text)
  end
end

for n, status in ipairs(row_status) do
  local at = 3 + (n - 1) * ROW
  local id, count, event, reason = ARGV[at], ARGV[at + 3], ARGV[at + 4], ARGV[at + 5]
  if status == 'ok' and known[id].is_broken then
    row_status[n] = 'finished'
  elseif status == 'ok' and reason ~= '' then
    local result = ARGV[at + 6]
    note_prompt(id)
    note_first_token(id, at)
    ending.finish(id, reason, count, event, known[id], result ~= '' and result or nil)
    charge_row(id, ARGV[at + 2], count)
  elseif status == 'ok' then
    local added = redis.pcall('XADD', keys.tokens(id), count .. '-0', 'event', event)
    if type(added) == 'table' and added.err then
      local message = tostring(added.err)
      row_status[n] = 'error ' .. message
      known[id].is_broken = true
      ending.finish_bare(id, 'error', 'internal_error', 'tokens: the log does not take an event: ' .. message)
    else
      requests.publish_event(id, event)
      note_first_token(id, at)
      charge_row(id, ARGV[at + 2], count)
    end
  elseif status == 'cancelled' or status == 'expired' then
    note_prompt(id)
    ending.finish_bare(id, status)
  end
end
local expiry, renewed = numbers.exact(server.now + lease_ms), {}
for n, status in ipairs(held_status) do
  local id = ARGV[held_from + (n - 1) * HELD]
  note_prompt(id)
  if status == 'ok' then
    renewed[#renewed + 1] = expiry
    renewed[#renewed + 1] = id
  elseif status == 'cancelled' or status == 'expired' then
    ending.finish_bare(id, status)
  end
end
server.for_all(redis.call, 'ZADD', keys.leases, renewed)
server.carry_out()
charge_accounts()
return {row_status, held_status}
