-- uses: keys, numbers, server, arguments, requests, scores, shortest_first, places
-- Look at the place of a request that waits, or that would be enqueued now (a quote). Changes nothing. The number of
-- commands does not grow with the number of requests and tenants.
-- ARGV by name: id. For a quote, without id: tenant, priority, deadline_ms, by_deadline, delay_ms (as in `enqueue`),
--       max_output (the most output tokens, or left out), expected_tokens (or left out), num_before (number of
--       requests that the same call enqueues before this one)
--       By position: 1 id
-- Reply {state}, '' for an unknown request; if the request waits or is new, {'waiting', how many wait in front ('':
--        unknown), 1 if that is the most that may run first else 0, how many are expected to run first, tokens of each
--        ('': unknown), time until a delayed request may run (ms), live workers, 1 if the queue is paused else 0, and
--        what workers did in the last minute: requests that ended, dispersion of their number, output tokens, in how
--        many ms; p50 and p95 of the time until the start (ms, '': unknown); and of a quote, until the end}. Numbers
--        with a fraction are text.

local args = arguments.read({
  'id', 'tenant', 'priority', 'deadline_ms', 'by_deadline', 'delay_ms', 'max_output', 'expected_tokens',
  'num_before',
}, 0)

if not args.id then
  server.read_settings('strict_priority', 'aging_ms', 'shortest_first_ms')
  local deadline_ms = args.by_deadline == '1' and numbers.whole(args.deadline_ms, 0) or 0
  local max_output = numbers.whole(args.max_output)
  local guess = shortest_first.guess(args.expected_tokens, max_output)
  local score = shortest_first.at_arrival(numbers.whole(args.priority, 0), deadline_ms, guess, max_output)
  return places.before_arrival(keys.tenant_name(args.tenant), numbers.exact(score), numbers.whole(args.num_before, 0),
    numbers.whole(args.delay_ms, 0), max_output or math.huge, guess)
end

local id = args.id
local fields = requests.read(id, 'state', 'tenant', 'score') or {}
if fields.state == 'active' or requests.is_final(fields.state) then return {fields.state} end

local tenant = keys.tenant_name(fields.tenant)
local home = keys.pending_of(tenant)
local num_in_front = redis.call('ZRANK', home, id) or nil
local delayed_until = not num_in_front and server.score_in(keys.delayed, id)
if not num_in_front and not delayed_until and redis.pcall('HEXISTS', keys.request(id), 'payload') ~= 1 then
  return {''}
end
if delayed_until then num_in_front = redis.call('ZCOUNT', home, '-inf', scores.read(fields.score)) end
return places.of({
  tenant = tenant, num_in_front = num_in_front, is_due = delayed_until and delayed_until <= server.now,
  delay_ms = delayed_until and math.max(0, math.ceil(delayed_until - server.now)) or 0,
})
