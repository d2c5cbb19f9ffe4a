//! Who starts the processes: mbperf itself (`--nproc_per_node N`), or torchrun, srun or mpirun, whose variables are read.

use std::io;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// torchrun's default.
const DEFAULT_PORT: u16 = 29_500;
/// Set for processes that mbperf started itself: their `--nproc_per_node` is done with.
const LAUNCHED: &str = "MBPERF_LAUNCHED";
/// `--nproc_per_node` at most: one NVLink domain holds 72 GPUs (NVL72), a machine fewer.
pub const MOST_LOCAL: u32 = 128;
/// Processes of a job at most: ten times the largest training jobs.
const MOST_RANKS: usize = 1 << 20;
/// What a rank may take to end after rank 0 has.
const PATIENCE: Duration = Duration::from_secs(8);
const LOOK: Duration = Duration::from_millis(20);

/// A run of several processes, as this one sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Start {
    pub size: usize,
    pub rank: usize,
    /// Among the processes of this machine.
    pub local_rank: usize,
    /// Where rank 0 waits for the others.
    pub master: String,
    /// `None`: rank 0 takes a free one and starts the others itself.
    pub port: Option<u16>,
    /// The launcher's variable that says how many there are, for messages.
    pub by: &'static str,
}

/// `None`: one process.
///
/// # Errors
/// Variables that do not fit together, in words.
pub fn start(nproc: Option<u32>, env: &dyn Fn(&str) -> Option<String>) -> Result<Option<Start>, String> {
    let own = env(LAUNCHED).is_some();
    if nproc == Some(1) {
        return Ok(None);
    }
    let found = from_environment(env)?;
    match (nproc, found) {
        (Some(n), None) => Ok(Some(Start {
            size: n as usize,
            rank: 0,
            local_rank: 0,
            master: "127.0.0.1".into(),
            port: None,
            by: "--nproc_per_node",
        })),
        (Some(n), Some(found)) if !own => Err(format!(
            "--nproc_per_node {n}, but {} says that a launcher has started {} processes: leave the option out, or start \
             mbperf without the launcher",
            found.by, found.size
        )),
        (_, found) => Ok(found),
    }
}

fn from_environment(env: &dyn Fn(&str) -> Option<String>) -> Result<Option<Start>, String> {
    let number = |name: &str| -> Result<Option<usize>, String> {
        env(name)
            .map(|text| {
                text.trim()
                    .parse()
                    .map_err(|_| format!("{name}={text:?} is no number; unset it or correct it"))
            })
            .transpose()
    };
    // torchrun's names first: they are what others are made to set too.
    let launchers = [
        ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
        (
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
    ];
    // What one launcher left out may be another's: Slurm's steps often set one of torchrun's.
    let mut half = None;
    for (by, rank_name, local_name, local_size) in launchers {
        let slurm = by.starts_with("SLURM");
        let (size, rank) = match (number(by)?, number(rank_name)?) {
            (Some(size), _) if !(1..=MOST_RANKS).contains(&size) => {
                return Err(format!(
                    "{by}={size}: a job has 1 to {MOST_RANKS} processes; correct it or unset it"
                ));
            }
            (Some(size), Some(rank)) => (size, rank),
            (Some(size), None) if size > 1 => {
                half = half.or(Some((by, size, rank_name)));
                continue;
            }
            // Rank 0 of nothing is how Slurm marks an allocation's own shell.
            (None, Some(rank)) if rank > 0 || !slurm => {
                half = half.or(Some((rank_name, rank, by)));
                continue;
            }
            _ => continue,
        };
        if rank >= size {
            return Err(format!("{rank_name}={rank} is not one of {by}={size} ranks (0 to {})", size - 1));
        }
        if size == 1 {
            break;
        }
        let here = env(local_size).and_then(|n| n.parse::<usize>().ok()) == Some(size);
        let nodes = env("SLURM_STEP_NODELIST").or_else(|| env("SLURM_NODELIST"));
        let first = nodes.filter(|_| slurm).map(|list| first_host(&list));
        let master = env("MASTER_ADDR").or(first).or_else(|| here.then(|| "127.0.0.1".to_owned()));
        let master = master.ok_or_else(|| {
            format!("{by}={size}, but MASTER_ADDR is not set: set it to the address of the machine of rank 0")
        })?;
        // Jobs that share a machine must not share a port.
        let job = number("SLURM_JOB_ID")?.map_or(0, |id| (id % 1000) as u16);
        let port = match number("MASTER_PORT")? {
            Some(port) => {
                let fits = u16::try_from(port).ok().filter(|port| *port > 0);
                fits.ok_or_else(|| format!("MASTER_PORT={port} is no port (1 to 65535)"))?
            }
            None => DEFAULT_PORT + job,
        };
        let local_rank = number(local_name)?.unwrap_or(0);
        return Ok(Some(Start { size, rank, local_rank, master, port: Some(port), by }));
    }
    match half {
        None => Ok(None),
        Some((given, value, missing)) => Err(format!(
            "{given}={value}, but {missing} is not set: a launcher sets both; set it, unset {given}, or give \
             --nproc_per_node 1 for one process"
        )),
    }
}

/// The first host of a Slurm list: `a[03-05,7],b` is `a03`.
fn first_host(list: &str) -> String {
    let end = list.find([',', '[']).unwrap_or(list.len());
    let (name, rest) = list.split_at(end);
    let number = rest.strip_prefix('[').map_or("", |r| r.split([',', '-', ']']).next().unwrap_or(""));
    format!("{name}{number}")
}

/// Ends this process when rank 0, which started it, is gone, on whatever path it went: also one that is stopped.
pub fn end_with_rank_0() {
    #[cfg(target_os = "linux")]
    if std::env::var_os(LAUNCHED).is_some() {
        use rustix::process::{Signal, set_parent_process_death_signal};
        // A kernel without it leaves what the other paths cannot end, as other systems do.
        let _ = set_parent_process_death_signal(Some(Signal::KILL));
    }
}

/// Ranks 1.. that rank 0 started on this machine. They end with it: those that do not are killed.
#[derive(Debug, Default)]
pub struct Children(Vec<(usize, Child)>);

impl Children {
    /// Starts ranks 1.. of `size` with this process's command line.
    pub fn start(size: usize, port: u16) -> io::Result<Self> {
        let program = std::env::current_exe()?;
        let mut all = Self::default();
        for rank in 1..size {
            let child = Command::new(&program)
                .args(std::env::args_os().skip(1))
                .envs([
                    (LAUNCHED, "1".to_owned()),
                    ("RANK", rank.to_string()),
                    ("LOCAL_RANK", rank.to_string()),
                    ("WORLD_SIZE", size.to_string()),
                    ("LOCAL_WORLD_SIZE", size.to_string()),
                    ("MASTER_ADDR", "127.0.0.1".to_owned()),
                    ("MASTER_PORT", port.to_string()),
                ])
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .spawn()?;
            all.0.push((rank, child));
        }
        Ok(all)
    }

    /// Without waiting for what they do: before the run has begun there is nothing to finish.
    pub fn kill(&mut self) {
        self.0.iter_mut().for_each(|(_, child)| drop(child.kill()));
    }

    /// A rank that has ended already, and how.
    pub fn ended(&mut self) -> Option<(usize, String)> {
        self.0.iter_mut().find_map(|(rank, child)| match child.try_wait() {
            Ok(Some(status)) => Some((*rank, status.to_string())),
            _ => None,
        })
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        let until = Instant::now() + PATIENCE;
        for (_, child) in &mut self.0 {
            while matches!(child.try_wait(), Ok(None)) {
                if Instant::now() >= until {
                    let _ = child.kill();
                    let _ = child.wait();
                    break;
                }
                std::thread::sleep(LOOK);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(nproc: Option<u32>, vars: &[(&str, &str)]) -> Result<Option<Start>, String> {
        let env = |name: &str| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        start(nproc, &env)
    }

    #[test]
    fn launchers_are_known_by_their_variables() {
        assert_eq!(of(None, &[]), Ok(None));
        assert_eq!(of(Some(1), &[("RANK", "1"), ("WORLD_SIZE", "2")]), Ok(None));
        let own = of(Some(4), &[]).unwrap().unwrap();
        assert_eq!((own.size, own.rank, own.port), (4, 0, None));
        let torchrun = [
            ("RANK", "9"),
            ("WORLD_SIZE", "16"),
            ("LOCAL_RANK", "1"),
            ("MASTER_ADDR", "node0"),
            ("MASTER_PORT", "1234"),
        ];
        let start = of(None, &torchrun).unwrap().unwrap();
        assert_eq!((start.size, start.rank, start.local_rank), (16, 9, 1));
        assert_eq!((start.master.as_str(), start.port, start.by), ("node0", Some(1234), "WORLD_SIZE"));
        let srun = [
            ("SLURM_STEP_NUM_TASKS", "16"),
            ("SLURM_PROCID", "8"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_STEP_NODELIST", "gpu[03-04]"),
            ("SLURM_JOB_ID", "71234"),
        ];
        let start = of(None, &srun).unwrap().unwrap();
        assert_eq!((start.rank, start.master.as_str(), start.port), (8, "gpu03", Some(29_734)));
        let mpirun = [
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ];
        let start = of(None, &mpirun).unwrap().unwrap();
        assert_eq!((start.rank, start.master.as_str(), start.port), (1, "127.0.0.1", Some(DEFAULT_PORT)));
    }

    #[test]
    fn what_does_not_fit_is_told() {
        let e = |nproc, vars: &[(&str, &str)]| of(nproc, vars).unwrap_err();
        assert!(e(None, &[("RANK", "2"), ("WORLD_SIZE", "2")]).contains("RANK=2"));
        assert!(e(None, &[("RANK", "x"), ("WORLD_SIZE", "2")]).contains("is no number"));
        assert!(e(None, &[("RANK", "0"), ("WORLD_SIZE", "2")]).contains("MASTER_ADDR"));
        let both = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "x")];
        assert!(e(Some(2), &both).contains("--nproc_per_node 2"));
        // Slurm's variables of a shell inside an allocation, which is no step of several.
        assert_eq!(of(None, &[("SLURM_NTASKS", "8"), ("SLURM_PROCID", "0")]), Ok(None));
    }

    #[test]
    fn half_a_launcher_is_refused_by_what_is_missing() {
        for (vars, part) in [
            (&[("RANK", "1")][..], "RANK=1, but WORLD_SIZE is not set"),
            (&[("RANK", "0")], "RANK=0, but WORLD_SIZE is not set"),
            (&[("WORLD_SIZE", "2")], "WORLD_SIZE=2, but RANK is not set"),
            (&[("OMPI_COMM_WORLD_SIZE", "2")], "OMPI_COMM_WORLD_RANK is not set"),
            (&[("SLURM_STEP_NUM_TASKS", "2")], "SLURM_PROCID is not set"),
            (&[("SLURM_PROCID", "3")], "SLURM_STEP_NUM_TASKS is not set"),
            (&[("RANK", "1"), ("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_PROCID", "0")], "WORLD_SIZE is not set"),
            (&[("WORLD_SIZE", "0")], "WORLD_SIZE=0"),
            (&[("WORLD_SIZE", "0"), ("RANK", "3")], "WORLD_SIZE=0"),
            (&[("WORLD_SIZE", "1"), ("RANK", "1")], "RANK=1 is not one of"),
            (&[("WORLD_SIZE", "18446744073709551615"), ("RANK", "0")], "1 to 1048576"),
            (
                &[("WORLD_SIZE", "2"), ("RANK", "0"), ("MASTER_ADDR", "x"), ("MASTER_PORT", "0")],
                "MASTER_PORT=0",
            ),
            (
                &[("WORLD_SIZE", "2"), ("RANK", "0"), ("MASTER_ADDR", "x"), ("MASTER_PORT", "65536")],
                "MASTER_PORT=65536",
            ),
        ] {
            let e = of(None, vars).unwrap_err();
            assert!(e.contains(part), "{vars:?}: {e}");
        }
        for vars in [
            &[("WORLD_SIZE", "1"), ("RANK", "0")][..],
            &[("WORLD_SIZE", "1")],
            &[("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_PROCID", "0")],
        ] {
            assert_eq!(of(None, vars), Ok(None), "{vars:?}");
        }
        // A script's own WORLD_SIZE beside the step's ranks.
        let step = [
            ("WORLD_SIZE", "2"),
            ("SLURM_STEP_NUM_TASKS", "2"),
            ("SLURM_PROCID", "1"),
            ("SLURM_STEP_NODELIST", "a"),
        ];
        assert_eq!(of(None, &step).unwrap().unwrap().rank, 1);
        assert_eq!(of(Some(1), &[("RANK", "1")]), Ok(None));
    }

    #[test]
    fn slurm_lists_begin_with_their_first_host() {
        for (list, first) in [("a", "a"), ("a,b", "a"), ("n[1-4],m", "n1"), ("n[007,9]", "n007")] {
            assert_eq!(first_host(list), first);
        }
    }
}
