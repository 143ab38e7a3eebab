-- The arguments of a script by name: after the word 'promptq:named' come name, value, name, value, ... After the name
-- 'then' come values without names. Without the first word, all values are in the order of release 0.3.

arguments.are_named = ARGV[1] == 'promptq:named'

function arguments.refuse(name, problem, names)
  error({err = string.format('ERR %s: %s; it has %s', name, problem, table.concat(names, ', '))})
end

local function refuse_unknown(found, names)
  for _, name in ipairs(names) do found[name] = nil end
  arguments.refuse(next(found), 'this script has no such argument', names)
end

-- Returns the values by name, and the position in ARGV after them. `names` has the order of release 0.3; the first
-- `num_needed` are required.
function arguments.read(names, num_needed)
  local found, at = {}, 2
  if not arguments.are_named then
    for nth, name in ipairs(names) do found[name] = ARGV[nth] end
    return found, #names + 1
  end
  local name = ARGV[at]
  while name and name ~= 'then' do
    found[name] = ARGV[at + 1]
    at = at + 2
    name = ARGV[at]
  end
  local num_known = 0
  for nth, known in ipairs(names) do
    if found[known] then num_known = num_known + 1
    elseif nth <= num_needed then arguments.refuse(known, 'this script needs it', names) end
  end
  if num_known < at / 2 - 1 then refuse_unknown(found, names) end
  return found, at + 1
end
