# Made by flux-distribute: changes are overwritten.
# More rc1 tasks (flux-modprobe(1)). What fails here is printed to the broker's log, and the start goes on.
# Only a job manager that can't be loaded again ends it.
import json

from flux.modprobe import task

LIVE_CONFIGURATION = "@LIVE_CONFIGURATION@"


@task("flux-distribute-configuration", ranks="0", before=["resource"], needs=["resource"])
def load_configuration(context):
    # Without it the broker comes up under other names, and the agent loads it then.
    try:
        with open(LIVE_CONFIGURATION) as file:
            context.rpc("config.load", json.load(file)).get()
    except Exception as error:
        print(f"flux-distribute: can't load the live configuration: {error}", flush=True)


# A scheduler stores a job's resources (R) before the job manager posts event alloc. If the broker dies between the two, or the
# scheduler is unloaded, the job waits again. The job manager reads that R at its next start. Once the scheduler gives the job
# resources again, it says "already allocated", and does without a scheduler from then on (flux-core #6059). It can't be made to
# forget an R: so what was never given is removed, and the job manager is loaded once more, before anything has to do with it. The
# job keeps its id and its place.
@task(
    "flux-distribute-jobs",
    ranks="0",
    needs=["job-manager"],
    after=["job-manager"],
    before=["job-exec", "job-ingest", "job-list", "sched"],
)
def remove_resources_never_given(context):
    # Without it the scheduler goes offline, and the next start tries again.
    try:
        import flux.kvs

        jobs = with_resources_never_given()
        if not jobs:
            return
        for job in jobs:
            flux.kvs.put_unlink(context.handle, f"{job.kvs}.R")
        # Not synced, because a full disk refuses only synced commits. If the broker dies again, the next start finds the same jobs.
        flux.kvs.commit(context.handle)
        for job in jobs:
            print(f"flux-distribute: job {job.f58} waits again: Flux had stored resources for it, and not given them", flush=True)
        manager = context.modprobe.get_task("job-manager")
        context.rpc("module.remove", {"name": manager.name}).get()
        manager.run(context)
    except Exception as error:
        print(f"flux-distribute: can't remove resources that jobs were never given: {error}", flush=True)


# If jobs ran when the broker died, job-exec ends them as it starts. If that falls between the scheduler's first two requests (RFC 27: hello,
# ready), the scheduler never hears of it and keeps their cores for ever.
@task("flux-distribute-scheduler", ranks="0", needs=["job-exec"], after=["sched"], before=["job-exec"])
def wait_for_scheduler(context):
    # Without it cores may be lost, which the agent reports.
    try:
        # A scheduler answers once it has made both requests.
        scheduler = context.modprobe.get_task("sched").name
        context.rpc(f"{scheduler}.ping", {"seq": 0, "pad": ""}).wait_for(60).get()
    except Exception as error:
        print(f"flux-distribute: the scheduler does not answer: {error}", flush=True)


def with_resources_never_given():
    """The active jobs that have an R and no event alloc."""
    import flux
    from flux.constants import FLUX_RPC_STREAMING
    from flux.job import JobID

    # This handle's end ends the request.
    request = {"allow": {"alloc": 1}, "full": False}
    journal = flux.Flux().rpc("job-manager.events-journal", request, flags=FLUX_RPC_STREAMING)
    jobs = []
    while True:
        # A start must not wait for ever for a job manager that ends its list in another way.
        job = journal.wait_for(60).get()
        # FLUX_JOBID_ANY, after all active jobs.
        if job["id"] in (-1, 2**64 - 1):
            return jobs
        if "R" in job and not job["events"]:
            jobs.append(JobID(job["id"]))
        journal.reset()
