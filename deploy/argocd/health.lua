-- Health of a DDPTrainingJob in Argo CD. docs/reference.md has the command that installs it.
local status = obj.status or {}
local ended = status.phase == "Succeeded" or status.phase == "Failed"
local outdated = (status.observedGeneration or 0) < (obj.metadata.generation or 0)
if not status.phase or (outdated and not ended) then
  return { status = "Progressing", message = "The operator has not read this version of the job yet" }
end

local health = { Succeeded = "Healthy", Failed = "Degraded", Rejected = "Degraded", Suspended = "Suspended" }
local cause = { Rejected = "Accepted" } -- otherwise the condition has the name of the phase
local message = status.reason or ""
for _, condition in ipairs(status.conditions or {}) do
  local names = condition.type == (cause[status.phase] or status.phase)
  if names or (condition.reason == status.reason and not health[status.phase]) then
    message = condition.message
  end
end
if message == "" then
  message = status.phase
end
return { status = health[status.phase] or "Progressing", message = message }
