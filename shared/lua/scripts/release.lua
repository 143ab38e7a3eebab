-- uses: server, requests, tenants, pending, ending, crashes, abilities
-- Return held requests, with their progress, to their old place in the queue.
-- ARGV  for each request: id, fence, prompt tokens ('' if unknown)
--       then, only if the worker's engine failed with them: max crashes (see reap). Each request gets a
--         crash at once
--       or else '' and a delay (ms) for each, with spaces between, before which it cannot be claimed again:
--         its preparation takes long, and the worker has no place for it yet. The attempt does not end
--       or else 'needs' and a field for each, with spaces between, which the worker's engine cannot serve
-- Reply a status for each: waiting, fenced (no longer held), finished, cancelled, dead, unserved (it has such a
--       field, and no live worker serves the request: this worker still holds it)

local HELD = 3
local max_crashes = #ARGV % HELD == 1 and tonumber(ARGV[#ARGV])
local delays, needs = {}, {}
if #ARGV % HELD == 2 and ARGV[#ARGV - 1] == 'needs' then
  for field in string.gmatch(ARGV[#ARGV], '%S+') do needs[#needs + 1] = field end
elseif #ARGV % HELD == 2 then
  for delay_ms in string.gmatch(ARGV[#ARGV], '%d+') do delays[#delays + 1] = tonumber(delay_ms) end
end

local function give_back(id, fence, prompt_tokens, delay_ms, field)
  local fields = requests.read(id, 'fence', 'state', 'cancelled', 'score', 'tenant', 'priority') or {}
  if requests.is_final(fields.state) then return 'finished' end
  if fields.fence ~= fence then return 'fenced' end
  if prompt_tokens ~= '' then tenants.note_prompt_tokens(id, prompt_tokens, fields.tenant, fields.priority) end
  if fields.cancelled == '1' then
    ending.finish_bare(id, 'cancelled')
    return 'cancelled'
  end
  if field and not abilities.note_need(id, field) then return 'unserved' end
  if max_crashes then return crashes.count(id, fields.score, max_crashes) end
  pending.put_back(id, fields.score, not delay_ms and 'given back', delay_ms)
  return 'waiting'
end

local statuses, wakes = {}, false
server.write_needs_no_memory()
for nth = 1, math.floor(#ARGV / HELD) do
  local at = (nth - 1) * HELD + 1
  statuses[nth] = give_back(ARGV[at], ARGV[at + 1], ARGV[at + 2], delays[nth], needs[nth])
  wakes = wakes or statuses[nth] ~= 'unserved'
end
server.carry_out()
if wakes and #delays == 0 then server.wake_workers() end
return statuses
