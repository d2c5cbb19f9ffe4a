//! The connection between rank 0 and each other rank, after the rendezvous: commands, answers, signs of life, and the end.
//!
//! Rank 0 decides everything (blocks, their order, the end) and says it between blocks; inside a block of timed steps
//! nobody speaks. A rank that fails says so and ends; rank 0 then ends all. A rank that dies is known by its closed
//! connection, a machine that dies by its silence.

use super::groups::Place;
use crate::device::{Arm, DeviceError, Phase};
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{Shutdown, TcpStream};
use std::rc::Rc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Signs of life, and how long they may stay away. With what follows all ranks end within 30 s of one that dies.
const BEAT: Duration = Duration::from_secs(2);
const SILENCE: Duration = Duration::from_secs(15);
/// After a failure the rank's own thread of work gets so long to come back and write its rows.
const GRACE: Duration = Duration::from_secs(8);
/// An error that another rank's end may have caused waits so long for that rank's own word.
const CAUSE: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(50);

/// A step as another rank saw it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RankStep {
    pub submit_ms: f64,
    pub wait_ms: f64,
    pub device_span_ms: Option<f64>,
    pub wall_ms: f64,
    pub loss: Option<f32>,
    pub grad_norm: Option<f32>,
}

/// Steps of one arm that all ranks run alike.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Steps {
    pub arm: Arm,
    pub count: usize,
    /// A step is submitted before the one before it is waited for.
    pub ahead: bool,
    /// The last is waited for too; otherwise it stays in flight for the next command.
    pub drain: bool,
    pub phase: Phase,
}

/// What rank 0 says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Command {
    Beat,
    /// Bytes of rank 0's that all use: communicator ids, chosen algorithms.
    Shared {
        what: String,
        bytes: Vec<u8>,
    },
    Reset,
    Steps(Steps),
    Capture,
    DestroyGraphs,
    Digest,
    /// The host model's times, or no longer.
    HostModel(bool),
    Busy(Arm),
    Profile(Arm),
    /// The run is over.
    End,
    /// It failed or was interrupted, and rank 0 says why: all end with this exit code, whatever they are doing.
    Abort(u8),
}

/// What another rank answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    Beat,
    Done,
    Digest(Vec<(String, u64)>),
    Steps(Vec<RankStep>),
    Failed { code: u8, message: String },
}

fn send<T: Serialize>(stream: &Mutex<TcpStream>, value: &T) -> io::Result<()> {
    let mut line = serde_json::to_string(value)?;
    line.push('\n');
    let mut stream = stream.lock().map_err(|_| io::Error::other("a sending thread panicked"))?;
    stream.write_all(line.as_bytes())
}

fn thread(name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), DeviceError> {
    let started = std::thread::Builder::new().name(name.into()).spawn(body);
    started.map(drop).map_err(|e| DeviceError::Invalid(format!("the thread {name:?} cannot be started: {e}")))
}

/// What rank 0's threads know of the others.
#[derive(Debug)]
struct Watch {
    /// The first failure: rank, exit code, message.
    failure: Option<(usize, u8, String)>,
    since: Option<Instant>,
    heard: Vec<Instant>,
    /// The run is over, or the failure is being told: closed connections mean nothing now.
    over: bool,
}

impl Watch {
    fn fail(&mut self, rank: usize, code: u8, message: String) {
        if self.failure.is_none() && !self.over {
            self.failure = Some((rank, code, message));
            self.since = Some(Instant::now());
        }
    }
}

/// Rank 0's side.
#[derive(Debug)]
pub struct Lead {
    links: Vec<Link>,
    watch: Arc<Mutex<Watch>>,
}

#[derive(Debug)]
struct Link {
    rank: usize,
    stream: Arc<Mutex<TcpStream>>,
    inbox: Receiver<Answer>,
}

impl Lead {
    /// Takes the connections of ranks 1.. into service. `abandon` is called when a rank has failed and this one does not
    /// come back from what it is doing: it must end the process.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn new(
        streams: Vec<TcpStream>,
        abandon: impl FnOnce(u8, String) + Send + 'static,
    ) -> Result<Self, DeviceError> {
        let watch = Arc::new(Mutex::new(Watch {
            failure: None,
            since: None,
            heard: vec![Instant::now(); streams.len()],
            over: false,
        }));
        let mut links = Vec::new();
        for (i, stream) in streams.into_iter().enumerate() {
            let rank = i + 1;
            let reader = stream.try_clone().map_err(|e| DeviceError::Invalid(format!("rank {rank}: {e}")))?;
            let (sender, inbox) = channel();
            let known = watch.clone();
            thread(&format!("rank {rank}"), move || listen(rank, reader, &sender, &known))?;
            links.push(Link { rank, stream: Arc::new(Mutex::new(stream)), inbox });
        }
        let (known, streams) = (watch.clone(), links.iter().map(|l| l.stream.clone()).collect::<Vec<_>>());
        thread("ranks", move || watch_over(&streams, &known, abandon))?;
        Ok(Self { links, watch })
    }

    pub fn ranks(&self) -> usize {
        self.links.len() + 1
    }

    /// To all other ranks.
    pub fn tell(&self, command: &Command) -> Result<(), DeviceError> {
        for link in &self.links {
            if let Err(e) = send(&link.stream, command) {
                return Err(
                    self.explain(DeviceError::Invalid(format!("rank {} cannot be reached ({e})", link.rank)))
                );
            }
        }
        Ok(())
    }

    /// One answer of each other rank, in their order.
    pub fn answers(&self) -> Result<Vec<Answer>, DeviceError> {
        self.links.iter().map(|link| self.answer(link)).collect()
    }

    fn answer(&self, link: &Link) -> Result<Answer, DeviceError> {
        loop {
            match link.inbox.recv_timeout(LOOK) {
                Ok(Answer::Failed { .. }) | Err(RecvTimeoutError::Disconnected) => {
                    let gone = format!("rank {} has ended", link.rank);
                    return Err(self.explain(DeviceError::Invalid(gone)));
                }
                Ok(answer) => return Ok(answer),
                // Another one's failure: this one may wait for it for ever.
                Err(RecvTimeoutError::Timeout) if self.failed() => {
                    return Err(self.explain(DeviceError::internal("a rank failed without a message")));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    fn failed(&self) -> bool {
        self.watch.lock().is_ok_and(|w| w.failure.is_some())
    }

    /// The failure of another rank if there is one, which then is the cause of `error`; a rank that has ended is given
    /// a moment to be heard.
    pub fn explain(&self, error: DeviceError) -> DeviceError {
        let until = Instant::now() + CAUSE;
        while !self.failed() && Instant::now() < until {
            std::thread::sleep(LOOK);
        }
        let Ok(mut watch) = self.watch.lock() else { return error };
        watch.over = true;
        match watch.failure.clone() {
            Some((rank, code, message)) => DeviceError::Rank { rank, code, message },
            None => error,
        }
    }

    /// All is done, or has failed here.
    fn end(&self, command: &Command) {
        if let Ok(mut watch) = self.watch.lock() {
            watch.over = true;
        }
        for link in &self.links {
            let _ = send(&link.stream, command);
        }
    }

    /// The run was whole.
    pub fn done(&self) {
        self.end(&Command::End);
    }

    /// It was not, and this rank says why. After [`Self::done`] nobody listens any more.
    pub fn give_up(&self, code: u8) {
        self.end(&Command::Abort(code));
        for link in &self.links {
            if let Ok(stream) = link.stream.lock() {
                let _ = stream.shutdown(Shutdown::Write);
            }
        }
    }
}

/// Reads what `rank` says until it ends.
fn listen(rank: usize, stream: TcpStream, inbox: &Sender<Answer>, watch: &Mutex<Watch>) {
    for line in BufReader::new(stream).lines() {
        let Ok(answer) = line.and_then(|l| Ok(serde_json::from_str::<Answer>(&l)?)) else { break };
        let Ok(mut watch) = watch.lock() else { return };
        watch.heard[rank - 1] = Instant::now();
        if let Answer::Failed { code, message } = &answer {
            watch.fail(rank, *code, message.clone());
        }
        drop(watch);
        if answer != Answer::Beat && inbox.send(answer).is_err() {
            return;
        }
    }
    if let Ok(mut watch) = watch.lock() {
        watch.fail(rank, 1, "its process ended without a word (killed, or out of memory?)".into());
    }
}

/// Gives signs of life, misses those of others, and ends the process when a failure is not taken up.
fn watch_over(streams: &[Arc<Mutex<TcpStream>>], watch: &Mutex<Watch>, abandon: impl FnOnce(u8, String)) {
    let mut beaten = Instant::now();
    loop {
        std::thread::sleep(LOOK);
        let due = beaten.elapsed() >= BEAT;
        if due {
            beaten = Instant::now();
            streams.iter().for_each(|s| drop(send(s, &Command::Beat)));
        }
        let Ok(mut now) = watch.lock() else { return };
        if now.over {
            return;
        }
        if let Some(i) = now.heard.iter().position(|heard| heard.elapsed() > SILENCE) {
            now.fail(
                i + 1,
                1,
                format!("not heard of for {} s: its machine or network is gone", SILENCE.as_secs()),
            );
        }
        let overdue = now.since.is_some_and(|since| since.elapsed() > GRACE);
        if let Some((rank, code, message)) = now.failure.clone().filter(|_| overdue) {
            now.over = true;
            drop(now);
            streams.iter().for_each(|s| drop(send(s, &Command::Abort(code))));
            return abandon(code, format!("rank {rank}: {message}"));
        }
    }
}

/// Another rank's side.
#[derive(Debug)]
pub struct Follow {
    pub rank: usize,
    stream: Arc<Mutex<TcpStream>>,
    inbox: Receiver<Command>,
    over: Arc<Mutex<bool>>,
}

impl Follow {
    /// `leave` is called with the exit code when rank 0 gives up, and without one when it is gone and this rank does not
    /// come back from what it is doing: it must end the process.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn new(
        rank: usize,
        stream: TcpStream,
        leave: impl FnOnce(Option<u8>) + Send + 'static,
    ) -> Result<Self, DeviceError> {
        let reader = stream.try_clone().map_err(|e| DeviceError::Invalid(format!("rank {rank}: {e}")))?;
        let stream = Arc::new(Mutex::new(stream));
        let (sender, inbox) = channel();
        let over = Arc::new(Mutex::new(false));
        let done = over.clone();
        // Silence is as good as a closed connection.
        reader
            .set_read_timeout(Some(SILENCE))
            .map_err(|e| DeviceError::Invalid(format!("rank {rank}: {e}")))?;
        thread("rank 0", move || {
            let mut ended = false;
            for line in BufReader::new(reader).lines() {
                let Ok(command) = line.and_then(|l| Ok(serde_json::from_str::<Command>(&l)?)) else { break };
                match command {
                    Command::Beat => {}
                    Command::Abort(_) if ended => break,
                    // At once: it may wait for rank 0 in a collective, and has no files to finish.
                    Command::Abort(code) => return leave(Some(code)),
                    other => {
                        ended = other == Command::End;
                        if sender.send(other).is_err() {
                            return;
                        }
                    }
                }
            }
            drop(sender);
            std::thread::sleep(GRACE);
            if done.lock().is_ok_and(|over| !*over) {
                leave(None);
            }
        })?;
        let beating = stream.clone();
        thread("sign of life", move || {
            while send(&beating, &Answer::Beat).is_ok() {
                std::thread::sleep(BEAT);
            }
        })?;
        Ok(Self { rank, stream, inbox, over })
    }

    /// The next command; `None`: rank 0 has gone or given up.
    pub fn next(&self) -> Option<Command> {
        self.inbox.recv().ok()
    }

    pub fn answer(&self, answer: &Answer) -> Result<(), DeviceError> {
        send(&self.stream, answer)
            .map_err(|e| DeviceError::Invalid(format!("rank 0 cannot be reached ({e})")))
    }

    /// Whether rank 0 goes within a moment: then this rank's error follows from that. One that gives up ends this process.
    pub fn given_up(&self) -> bool {
        let until = Instant::now() + CAUSE / 2;
        loop {
            match self.inbox.recv_timeout(LOOK) {
                Err(RecvTimeoutError::Disconnected) => return true,
                _ if Instant::now() >= until => return false,
                _ => {}
            }
        }
    }

    /// Says an answer from another thread.
    pub fn teller(&self) -> impl Fn(Answer) -> io::Result<()> + Send + 'static {
        let stream = self.stream.clone();
        move |answer| send(&stream, &answer)
    }

    /// This rank comes to its end by itself.
    pub fn over(&self) {
        if let Ok(mut over) = self.over.lock() {
            *over = true;
        }
    }
}

/// Bytes that rank 0 makes and all ranks use.
#[derive(Debug, Clone)]
pub enum Share {
    Lead(Rc<Lead>),
    Follow(Rc<Follow>),
}

impl Share {
    /// What `make` gives on rank 0. All ranks ask for the same things in the same order.
    ///
    /// # Errors
    /// Those of `make` on rank 0; rank 0 is gone or shares something else.
    pub fn from_rank_0(
        &self,
        what: &str,
        make: impl FnOnce() -> Result<Vec<u8>, DeviceError>,
    ) -> Result<Vec<u8>, DeviceError> {
        match self {
            Share::Lead(lead) => {
                let bytes = make()?;
                lead.tell(&Command::Shared { what: what.into(), bytes: bytes.clone() })?;
                Ok(bytes)
            }
            Share::Follow(follow) => match follow.next() {
                Some(Command::Shared { what: theirs, bytes }) if theirs == what => Ok(bytes),
                Some(other) => {
                    Err(DeviceError::internal(format!("rank 0 gave {other:?} where {what} was due")))
                }
                None => Err(DeviceError::Invalid("rank 0 has gone".into())),
            },
        }
    }
}

/// What a rank's device must know of the others.
#[derive(Debug, Clone)]
pub struct Team {
    pub share: Share,
    pub place: Place,
    /// Among the processes of this machine: which GPU is this one's.
    pub local_rank: usize,
}

thread_local! {
    /// Of the rank that this thread runs.
    static TEAM: RefCell<Option<Team>> = const { RefCell::new(None) };
}

/// Devices that this thread opens from now on are those of a rank.
pub fn install(team: Team) {
    TEAM.set(Some(team));
}

/// `None`: one process.
pub fn team() -> Option<Team> {
    TEAM.with_borrow(Clone::clone)
}
