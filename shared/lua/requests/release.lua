-- Give held requests back, with their progress, at their old place in the queue.
-- KEYS  1 pending
-- ARGV  for each request: id, fence, prompt tokens ('' if unknown)
--       then, only if the worker's engine failed with them: max crashes (see reap); it counts as a
--         crash of each, at once
--       or else '' and, with a space between, for how many ms each is kept from being claimed again: its
--         preparation takes long, and the worker has no place for it yet. This is no end of an attempt.
-- Reply a status for each: waiting, fenced (not held any more), finished, cancelled, dead

local HELD = 3
local max_crashes = #ARGV % HELD == 1 and tonumber(ARGV[#ARGV])
local delays = {}
if #ARGV % HELD == 2 then
  for delay_ms in string.gmatch(ARGV[#ARGV], '%d+') do delays[#delays + 1] = tonumber(delay_ms) end
end
local statuses = {}
write_needs_no_memory()
for nth = 1, math.floor(#ARGV / HELD) do
  local at = (nth - 1) * HELD + 1
  local id, fence, prompt_tokens = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local fields = read_request(id, 'fence', 'state', 'cancelled', 'score', 'tenant', 'priority') or {}
  local status = 'waiting'
  if is_final(fields.state) then
    status = 'finished'
  elseif fields.fence ~= fence then
    status = 'fenced'
  else
    if prompt_tokens ~= '' then tell_prompt_tokens(id, prompt_tokens, fields.tenant, fields.priority) end
    if fields.cancelled == '1' then
      finish_bare(id, 'cancelled')
      status = 'cancelled'
    elseif max_crashes then
      status = count_crash(id, fields.score, max_crashes)
    else
      back_to_waiting(id, fields.score, not delays[nth] and 'given back', delays[nth])
    end
  end
  statuses[#statuses + 1] = status
end
carry_out()
if #delays == 0 then wake_workers() end
return statuses
