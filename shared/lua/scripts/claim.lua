-- uses: keys, numbers, server, arguments, pictures, requests, pending, ending, tenants, fair_share, running_limits, abilities, overflow, affinity, shortest_first
-- Give a worker the requests for which it has room, in queue order.
-- ARGV by name, or by position:
--   1 worker: its id
--   2 lease_ms
--   3 max_count
--   4 token_budget: KV tokens that are free
--   5 capacity: the most KV tokens that one request may take; no cost is higher
--   6 nonce: random, new for each call
--   7 version of the protocol that the worker reads
--   8 model: its name
--   9 fingerprint of the model (both '': any model)
--  10 preemptible: 'priority:tokens ...' of running sequences; a more urgent request may
--     count their slots and tokens as free, since it will preempt them
--  11 seed_base: a request without a seed gets one made of this and its id. '': made of its id and the
--     nonce of the call that enqueued it, so that it is the same again after a claim was lost
--  12 num_held: how many requests the worker holds; left out: it never gets a suspect
--  13 session: random, the same for all calls of a worker that makes one call at a time; '' or left out
--     for a worker that makes several at once
--  14 answered: nonce of the last call of the session that gave something, as far as the worker knows
--  15 skip: how many requests to skip after the first few: 0 at first, then what the last reply said
--  16 number of the call within its session, from 1 on; left out: a late call is not recognised
--  17 output_style: how the model writes a tool call, as JSON; '' or left out: not given
--  18 num_sharing: how many workers share what waits. The worker gets no more than its share, with what it holds
--     (num_held); or else a small part, since the others may have no room. Left out: no share is kept for others
--  19 held: what the worker holds, 'priority:sequences:tokens:tenant ...': by tenant and priority, how many
--     sequences run that may be preempted, and their tokens. A tenant that is not in the list gets a request
--     even from a full worker, if its share of what others run there suffices. Left out: it does not
--  20 refused: fields that the worker's engine cannot serve. A request that is known to need one of them is left
--     to a worker that serves it, if one lives
--  21 overflow: '1' for an overflow worker, whatever its model
-- Reply {'ok', now, still pending, [skip, if the call has one,] claim, ...}, each claim
--       {id, payload (with its pictures), fence, attempt, score, seed, enqueued_at,
--        prompt_tokens ('' if never tokenised), cost, {event JSON, ...}, '1' for a suspect (hold nothing else
--        beside it) or '', tokens in the log, turn, tenant, weight}. Without tenants the last three are left out.
--        `turn` is the lowest score when the claim took this request; if the claim repeats an earlier one, `turn`
--        is the request's score. `tenant` names the queue from which the claim took the request. If an overflow
--        worker with another model has had the request, '1' follows (the three may then be empty). With affinity_ms,
--        words follow that say what affinity did for the request (the four may then be empty)
--       {'paused'}
--       {'model', name, fingerprint}   the queue is served by workers of this other model

local args = arguments.read({
  'worker', 'lease_ms', 'max_count', 'token_budget', 'capacity', 'nonce', 'version', 'model', 'fingerprint',
  'preemptible', 'seed_base', 'num_held', 'session', 'answered', 'skip', 'number', 'output_style', 'num_sharing',
  'held', 'refused', 'overflow',
}, 7)
local lease_ms, max_count, budget = tonumber(args.lease_ms), tonumber(args.max_count), tonumber(args.token_budget)
local capacity, nonce, version = tonumber(args.capacity), args.nonce, tonumber(args.version)
local model, fingerprint, seed_base = args.model or '', args.fingerprint or '', args.seed_base or ''
local num_held, session, answered = tonumber(args.num_held), args.session or '', args.answered or ''
local refused, skip = args.refused or '', numbers.whole(args.skip, 0)
local is_overflow, is_foreign, has_affinity = (args.overflow or '') ~= '', false, false

local MAX_PAYLOAD = 8 * 1024 * 1024
local MAX_PASSES = 8    -- how often an oversized request or a suspect is overtaken before room is kept
local SMALL_PART = 4     -- beyond its share, a worker may take a quarter of one worker's part of what waits
local MAX_EXAMINED = 512 -- bounds the time of one call when many are cancelled or do not fit

server.read_settings('pubsub', 'paused', 'affinity_ms', 'tenant_max_running', 'max_running:')
server.write_needs_no_memory()

-- Compare this call with the last one that returned requests. If the worker has not seen that reply, it was
-- lost: its requests return to the queue, without a crash, because the worker lives. If the last call was this
-- one, sent twice, it returns the same requests again, whichever reply the worker reads. If the last call has a
-- higher number, this call is late, and nobody waits for its reply.
local claimed_key, number = keys.prefix .. 'claimed:' .. session, tonumber(args.number) or 0
local is_late, last_claimed = false, {}
local function look_at_last_call()
  local last = redis.pcall('GET', claimed_key)
  if type(last) ~= 'string' then return end
  local words = string.gmatch(last, '%S+')
  local last_nonce, last_number = words() or '', tonumber(words() or 0) or 0
  is_late = number > 0 and number < last_number
  if is_late or last_nonce == answered then return end
  if last_nonce ~= nonce then redis.call('DEL', claimed_key) end
  for id in words do
    local fields = requests.read(id, 'state', 'fence', 'score') or {}
    if fields.state == 'active' and fields.fence
        and string.match(fields.fence, '^%d+%-(.*)$') == last_nonce then
      if last_nonce == nonce then
        last_claimed[#last_claimed + 1] = id
      else
        pending.put_back(id, fields.score, 'its claim was lost')
      end
    end
  end
end
if session ~= '' then
  look_at_last_call()
  server.carry_out()
end

if is_late then return {'ok', server.now_text, 0, 0} end
if #last_claimed == 0 then
  if server.config('paused') == '1' then return {'paused'} end
  local affinity_ms = not is_overflow and server.number('affinity_ms', 0) or 0
  has_affinity = affinity_ms > 0 and affinity.turn_on(args.worker, affinity_ms)
end

-- The queue's model, as its first worker named it. Earlier releases read it from `config`, so it is written
-- there too, unless the worker's role may only read that key. It is read from there if a stranger gave the
-- key `model` another type.
local model_key, config_key = keys.prefix .. 'model', keys.prefix .. 'config'
local function write_model(...)
  redis.pcall('HSET', model_key, ...)
  if not redis.acl_check_cmd or redis.acl_check_cmd('HSET', config_key, ...) then
    redis.call('HSET', config_key, ...)
  end
end
if is_overflow then
  is_foreign = fingerprint == '' or redis.pcall('HGET', model_key, 'fingerprint') ~= fingerprint
elseif fingerprint ~= '' then
  local stored = redis.pcall('HMGET', model_key, 'model', 'fingerprint', 'tool_call_style')
  local name, known, style = stored[1], stored[2], args.output_style or ''
  if not known then
    name, known = server.config('model', model), server.config('fingerprint', fingerprint)
    write_model('model', name, 'fingerprint', known)
  end
  if known ~= fingerprint then return {'model', name, known} end
  if style ~= '' and style ~= stored[3] then write_model('tool_call_style', style) end
end

local preemptible = {}
for priority, tokens in string.gmatch(args.preemptible or '', '(-?%d+):(%d+)') do
  preemptible[#preemptible + 1] = {tonumber(priority), tonumber(tokens)}
end

-- Slots and tokens that a request of this priority may take from less urgent ones.
local preemptible_by = {}
local function preemptible_for(priority)
  local found = preemptible_by[priority]
  if not found then
    found = {0, 0}
    for _, running in ipairs(preemptible) do
      if running[1] > priority then found = {found[1] + 1, found[2] + running[2]} end
    end
    preemptible_by[priority] = found
  end
  return found[1], found[2]
end

local holders, is_held_here = {}, {} -- what each tenant runs at this worker, and whether it runs anything
for priority, num, tokens, tenant in string.gmatch(args.held or '', '(-?%d+):(%d+):(%d+):([%w_.%-]*)') do
  holders[#holders + 1] = {tonumber(priority), tonumber(num), tonumber(tokens), tenant}
  is_held_here[tenant] = true
end

-- Slots and tokens that a tenant, which runs nothing at this worker, may take from the others: by weight, its
-- share of what each of them has. No request makes room for a less urgent one.
local function share_of(tenant, priority)
  local slots, tokens, weight = 0, 0, tenants.weight_of(tenant)
  for _, holder in ipairs(holders) do
    if holder[1] >= priority then
      local share = weight / (weight + tenants.weight_of(holder[4]))
      slots, tokens = slots + math.floor(holder[2] * share), tokens + holder[3] * share
    end
  end
  return slots, tokens
end

-- 9 of 10 finished requests had no more output than this.
local function measured_output()
  local counts = {}
  for i, finished in ipairs(ending.read_outputs()) do counts[i] = finished[2] end
  if #counts == 0 then return requests.DEFAULT_OUTPUT end
  table.sort(counts)
  return counts[math.ceil(#counts * 0.9)]
end

local function is_newer(payload)
  if (numbers.in_json(payload, 'version') or 1) <= version then return false end
  local parsed, request = pcall(cjson.decode, payload)
  return parsed and type(request) == 'table' and (tonumber(request.version) or 1) > version
end

local function prompt_tokens_of(fields)
  return numbers.whole(fields.prompt_tokens) or requests.estimated_prompt(fields.payload)
end

-- A guess only lowers the cost. If requests outgrow their costs, the worker preempts some.
local function cost_of(fields, output)
  local guess = fields.expected_tokens and shortest_first.guess(fields.expected_tokens, output)
  if guess then output = math.ceil(shortest_first.expected_output(guess, output)) end
  local max_tokens = requests.requested_output(fields.payload) or output
  return math.max(0, math.min(prompt_tokens_of(fields) + math.min(max_tokens, output), capacity))
end

-- A number below 2^46 made of a text. Sampling mixes it further, so it need only differ between texts.
local function seed_of(text)
  local seed = 0
  for i = 1, #text do seed = (seed * 127 + string.byte(text, i)) % 70368744177643 end
  return numbers.exact(seed)
end

local expiry, new_leases = numbers.exact(server.now + lease_ms), {}

-- Holds the id of the last suspect that was handed out. The key expires unless claims read it.
local alone_key, ALONE_MS = keys.prefix .. 'alone', 10000

-- Whether some worker runs a suspect. Then no room is kept for another one, so that other workers serve the
-- rest.
local function some_suspect_runs()
  local id = redis.pcall('GET', alone_key)
  if type(id) ~= 'string' or not redis.call('ZSCORE', keys.leases, id) then return false end
  redis.call('PEXPIRE', alone_key, ALONE_MS)
  return true
end

local claimed_ids = {} -- a stranger may have put one id into the queues of two tenants

-- The reply for one claim. Its lease begins here.
local function reply_of(id, fields, cost, has_log, turn, tenant)
  new_leases[#new_leases + 1] = expiry
  new_leases[#new_leases + 1] = id
  local payload = fields.pictures and pictures.insert(fields.payload, fields.pictures) or fields.payload
  local reply = {id, payload, fields.fence, fields.attempt, fields.score, fields.seed, fields.enqueued_at,
    numbers.whole(fields.prompt_tokens, ''), numbers.exact(cost),
    has_log and requests.log_events(id) or {}, fields.suspect and '1' or '',
    has_log and numbers.exact((requests.log_top(id))) or '0', turn, turn and tenant,
    turn and numbers.precise(tenants.weight_of(tenant))}
  if fields.foreign or fields.outcome then
    for at = 13, 15 do reply[at] = reply[at] or '' end
    reply[16], reply[17] = fields.foreign and '1' or '', fields.outcome
  end
  return reply
end

local function claim(queue, fields, cost, has_log, turn)
  local id, score = queue.id, queue.score
  local attempt = numbers.whole(fields.attempt, 0) + 1
  local fence = attempt .. '-' .. nonce
  local base = seed_base ~= '' and seed_base or fields.nonce or ''
  local seed = numbers.whole(fields.seed, -1) >= 0 and fields.seed or seed_of(base .. id)
  local enqueued_at = numbers.whole(fields.enqueued_at) and fields.enqueued_at or server.now_text
  redis.call('HSET', keys.request(id), 'state', 'active', 'attempt', attempt, 'fence', fence,
    'worker', args.worker, 'seed', seed, 'score', score, 'enqueued_at', enqueued_at,
    'claimed_at', server.now_text)
  if ending.wants_webhook(fields.payload) then redis.call('HSET', keys.request(id), 'webhook', 1) end
  if fields.state == 'waiting' then
    pending.count_later('tokens', fields.tenant, -numbers.whole(fields.tokens, 0))
  end
  if fair_share.is_shared then
    local level = fair_share.priority_at(queue)
    redis.call('HSET', keys.request(id), 'tenant', queue.tenant, 'priority', numbers.exact(level))
    if attempt == 1 then fair_share.charge(queue, level, prompt_tokens_of(fields)) end
    claimed_ids[id] = true
  end
  running_limits.count(fair_share.is_shared and queue.tenant or fields.tenant, id)
  if has_affinity then fields.outcome = affinity.note_claim(queue) end
  is_held_here[queue.tenant] = true
  if is_foreign then
    redis.call('HSET', keys.request(id), 'foreign', 1)
    fields.foreign = '1'
  end
  if fields.suspect then
    redis.call('HSET', keys.request(id), 'alone', 1)
    redis.call('SET', alone_key, id, 'PX', ALONE_MS)
  end
  fields.fence, fields.attempt, fields.score = fence, attempt, score
  fields.seed, fields.enqueued_at = seed, enqueued_at
  return reply_of(id, fields, cost, has_log, fair_share.is_shared and turn or nil, queue.tenant)
end

pending.promote_delayed()
local output = measured_output()
local claims, taken_tokens, passed_over = {}, 0, {}
local examined, walking = 0, true -- nothing leaves a queue before the walk is over
local is_full = false -- then only tenants that run nothing at this worker get a request

local function refuse(id, message)
  ending.finish_bare(id, 'error', 'invalid_request', message)
end

-- Take, end or pass over the current request of a queue's walk. Returns whether it stays in the queue.
local function examine(queue, turn)
  local id = queue.id
  local wrong = requests.wrong_id(id)
  if wrong then return refuse(id, wrong) end
  local fields = requests.read(id, 'payload', 'state', 'cancelled', 'attempt', 'prompt_tokens',
    'seed', 'nonce', 'enqueued_at', 'priority', 'passed', 'last_event', 'tenant', 'tokens', 'suspect', 'needs',
    'foreign', 'pictures', 'expected_tokens')
  if not fields then
    return refuse(id, 'request: the key promptq:{queue}:request:ID is not a hash')
  end
  if requests.is_final(fields.state) then
    if fields.last_event then requests.publish_event(id, fields.last_event) end
    requests.drop_holds(id, fields.tenant)
    return
  end
  if fields.state == 'active' and (claimed_ids[id] or redis.call('ZSCORE', keys.leases, id)) then return end
  if not fields.payload then
    return refuse(id, 'payload: the request has no hash, or its hash has no payload')
  end
  if #fields.payload > MAX_PAYLOAD then
    return refuse(id, string.format(
      'payload: %d bytes are more than the %d allowed', #fields.payload, MAX_PAYLOAD))
  end
  local kind = redis.call('TYPE', keys.tokens(id)).ok
  if kind ~= 'stream' and kind ~= 'none' then
    return refuse(id, 'tokens: the key promptq:{queue}:tokens:ID is not a stream')
  end
  if fields.cancelled == '1' or requests.is_past_deadline(id) then
    ending.finish_bare(id, fields.cancelled == '1' and 'cancelled' or 'expired')
    return
  end
  if is_newer(fields.payload) or fields.needs and abilities.is_for_others(fields.needs, refused) then return true end

  local priority = numbers.whole(fields.priority) or numbers.in_json(fields.payload, 'priority') or 0
  local cost = cost_of(fields, output)
  local more_slots, more_tokens = preemptible_for(priority)
  if fair_share.is_shared and not is_held_here[queue.tenant] then
    local slots, tokens = share_of(queue.tenant, priority)
    more_slots, more_tokens = math.max(more_slots, slots), math.max(more_tokens, tokens)
  end
  if #claims >= max_count + more_slots then
    is_full, queue.is_left_out = true, true
    return true
  end
  local must_wait = fields.suspect and (num_held ~= 0 or #claims > 0)
  if must_wait or taken_tokens + cost > budget + more_tokens then
    local passed = numbers.whole(fields.passed, 0)
    passed_over[#passed_over + 1] = {id, passed}
    if passed >= MAX_PASSES and not must_wait then is_full, queue.is_left_out = true, true end
    if passed >= MAX_PASSES and must_wait and not some_suspect_runs() then walking = false end
    return true
  end
  if is_overflow and not overflow.take(fields.payload, cost, is_foreign) then return true end
  if fields.suspect then walking = false end -- it runs alone
  -- Passed requests count this only when a request behind them is taken.
  for _, overtaken in ipairs(passed_over) do
    redis.call('HSET', keys.request(overtaken[1]), 'passed', overtaken[2] + 1)
  end
  passed_over = {}
  taken_tokens = taken_tokens + cost
  claims[#claims + 1] = claim(queue, fields, cost, kind == 'stream', turn)
end

for _, id in ipairs(last_claimed) do
  local fields = requests.read(id, 'payload', 'fence', 'attempt', 'score', 'seed', 'enqueued_at',
    'prompt_tokens', 'suspect', 'tenant', 'foreign', 'pictures', 'expected_tokens')
  local has_log = redis.call('TYPE', keys.tokens(id)).ok == 'stream'
  local tenant = keys.tenant_name(fields.tenant)
  local turn = tenant ~= '' and fields.score or nil
  claims[#claims + 1] = reply_of(id, fields, cost_of(fields, output), has_log, turn, tenant)
  walking = false
end

fair_share.open_all(skip)
-- Otherwise the first of several idle workers would take a whole burst, and the others nothing.
local num_sharing = numbers.whole(args.num_sharing, 1)
if num_sharing > 1 and not is_overflow then
  local num_waiting = fair_share.num_waiting()
  local share = math.ceil((num_waiting + redis.call('ZCARD', keys.leases)) / num_sharing) - (num_held or 0)
  max_count = math.min(max_count, math.max(share, math.ceil(num_waiting / num_sharing / SMALL_PART)))
end
if is_overflow then
  for queue in walking and overflow.walk() or function() end do
    if #claims >= max_count then break end
    passed_over = {} -- no room is kept here
    if not running_limits.is_reached(queue.tenant) and not examine(queue, queue.score) then
      redis.call('ZREM', queue.key, queue.id)
    end
  end
  walking = false
end
while walking and examined < MAX_EXAMINED and #claims < max_count + #preemptible do
  local queue, turn = fair_share.next_queue()
  if not queue or is_full and #holders == 0 then break end
  if is_full and is_held_here[queue.tenant] or running_limits.is_reached(queue.tenant) then
    queue.is_left_out = true
  elseif has_affinity and not affinity.choose(queue) then
    queue.is_left_out = true -- for other workers
  else
    examined = examined + 1
    if not examine(queue, turn) then
      server.remove_later(queue.key, queue.id)
      queue.num_gone = queue.num_gone + 1
    end
    fair_share.step(queue)
  end
end
server.for_all(redis.call, 'ZADD', keys.leases, new_leases)
fair_share.settle()
if has_affinity and #claims > 0 then affinity.note_held((num_held or 0) + #claims) end
server.carry_out()

-- Where the next call continues: after requests that are for other workers, so that these hide no others. A call
-- that returns requests keeps the place.
local next_skip = #claims > 0 and skip or 0
if examined >= MAX_EXAMINED and #claims == 0 and #passed_over == 0 then
  next_skip = fair_share.num_passed()
elseif #claims == 0 and has_affinity and affinity.has_left_some then
  next_skip = math.max(skip, 1) -- so that the worker comes again soon
end
if session ~= '' and #claims > 0 then
  local words = {nonce, numbers.exact(number)}
  for i, claimed in ipairs(claims) do words[i + 2] = claimed[1] end
  redis.call('SET', claimed_key, table.concat(words, ' '), 'PX', lease_ms)
end
local reply = {'ok', server.now_text, fair_share.count_waiting(#claims)}
if args.skip then reply[4] = next_skip end
for _, claimed in ipairs(claims) do reply[#reply + 1] = claimed end
return reply
