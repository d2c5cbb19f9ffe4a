//! How the processes find each other: rank 0 listens, the others come; one line each way tells who is who.

use super::launch::{Children, Start};
use crate::device::DeviceError;
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const LOOK: Duration = Duration::from_millis(20);
/// A line of the rendezvous comes at once or not at all.
const LINE: Duration = Duration::from_secs(10);
/// A longer line comes from something else.
const LONGEST_LINE: u64 = 64 << 10;
/// Ranks that a message names: more make no line that is read.
const NAMED_RANKS: usize = 8;

/// What a rank says when it comes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    pub version: String,
    pub rank: usize,
    pub size: usize,
    /// Of its configuration: all must run the same.
    pub config: u64,
    /// Where it listens for the others' data.
    pub data_port: u16,
}

/// What rank 0 answers: where every rank listens for data, or why it cannot take part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    Welcome { data: Vec<String> },
    Refused { why: String },
}

fn failed(what: impl Into<String>) -> DeviceError {
    DeviceError::Invalid(what.into())
}

/// Numbers as a sentence has them: `1, 3 and 4`, of many the first: `1, 2, 3 and 97 more`.
pub fn list(ranks: &[usize]) -> String {
    let mut words: Vec<String> = ranks.iter().take(NAMED_RANKS).map(ToString::to_string).collect();
    if ranks.len() > NAMED_RANKS {
        words.push(format!("{} more", ranks.len() - NAMED_RANKS));
    }
    match words.split_last() {
        None => String::new(),
        Some((last, [])) => format!("rank {last}"),
        Some((last, before)) => format!("ranks {} and {last}", before.join(", ")),
    }
}

fn write_line<T: Serialize>(mut stream: &TcpStream, value: &T) -> io::Result<()> {
    let mut line = serde_json::to_string(value)?;
    line.push('\n');
    stream.write_all(line.as_bytes())
}

fn read_line<T: for<'a> Deserialize<'a>>(stream: &TcpStream) -> io::Result<T> {
    // Byte by byte: what follows the line belongs to the next reader.
    let mut line = String::new();
    BufReader::with_capacity(1, stream.take(LONGEST_LINE)).read_line(&mut line)?;
    Ok(serde_json::from_str(&line)?)
}

/// Rank 0's listener: at the port that the launcher names, or at a free one.
pub fn listen(start: &Start) -> Result<TcpListener, DeviceError> {
    let host = if start.port.is_some() { "0.0.0.0" } else { "127.0.0.1" };
    let port = start.port.unwrap_or(0);
    TcpListener::bind((host, port)).map_err(|e| {
        failed(format!("rank 0 cannot listen at port {port} ({e}): set MASTER_PORT to a free one"))
    })
}

/// Waits for all other ranks; gives their connections, from rank 1 on, and where every rank listens for data.
///
/// # Errors
/// Ranks that do not come in time, by number; one that runs something else; one that has ended; a signal.
pub fn gather(
    listener: &TcpListener,
    own: &Hello,
    start: &Start,
    timeout: Duration,
    children: &mut Children,
    interrupt: &AtomicBool,
) -> Result<(Vec<TcpStream>, Vec<String>), DeviceError> {
    let until = Instant::now() + timeout;
    let io = |e: io::Error| failed(format!("rank 0 cannot wait for the others: {e}"));
    listener.set_nonblocking(true).map_err(io)?;
    let port = listener.local_addr().map_or(0, |a| a.port());
    let mut come: Vec<Option<(TcpStream, Hello)>> = (1..own.size).map(|_| None).collect();
    while come.iter().any(Option::is_none) {
        if interrupt.load(Ordering::Relaxed) {
            children.kill();
            return Err(failed("interrupted before all ranks had come"));
        }
        if let Some((rank, how)) = children.ended() {
            return Err(failed(format!(
                "rank {rank} ended ({how}) before it came to rank 0; its own message says why"
            )));
        }
        match listener.accept() {
            Ok((stream, _)) => {
                // Whatever else knocks at the port is left alone.
                let Ok(hello) = take(&stream) else { continue };
                if let Some(why) = unfit(own, &hello, &come) {
                    let _ = write_line(&stream, &Answer::Refused { why: why.clone() });
                    return Err(failed(why));
                }
                let rank = hello.rank;
                come[rank - 1] = Some((stream, hello));
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                if Instant::now() >= until {
                    let missing: Vec<usize> = (1..own.size).filter(|rank| come[rank - 1].is_none()).collect();
                    return Err(failed(format!(
                        "{} of {} did not come to {}:{port} within {} s (--rendezvous_timeout); {} says that there are \
                         {}: start them all, or one process with --nproc_per_node 1",
                        list(&missing),
                        own.size,
                        start.master,
                        timeout.as_secs_f64(),
                        start.by,
                        own.size
                    )));
                }
                std::thread::sleep(LOOK);
            }
            Err(e) => return Err(io(e)),
        }
    }
    let mut data = vec![format!("{}:{}", start.master, own.data_port)];
    let come: Vec<(TcpStream, Hello)> = come.into_iter().flatten().collect();
    for (stream, hello) in &come {
        let host = stream.peer_addr().map_err(io)?.ip();
        data.push(std::net::SocketAddr::new(host, hello.data_port).to_string());
    }
    for (stream, _) in &come {
        write_line(stream, &Answer::Welcome { data: data.clone() }).map_err(io)?;
    }
    Ok((come.into_iter().map(|(stream, _)| stream).collect(), data))
}

fn take(stream: &TcpStream) -> io::Result<Hello> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(LINE))?;
    let hello = read_line(stream)?;
    stream.set_read_timeout(None)?;
    Ok(hello)
}

/// Why a process that came cannot take part.
fn unfit(own: &Hello, other: &Hello, come: &[Option<(TcpStream, Hello)>]) -> Option<String> {
    let Hello { rank, size, .. } = *other;
    if other.version != own.version {
        return Some(format!(
            "rank {rank} is mbperf {}, rank 0 is {}: start the same program",
            other.version, own.version
        ));
    }
    if size != own.size || rank == 0 || rank >= own.size {
        return Some(format!("a process came as rank {rank} of {size}; rank 0 is one of {}", own.size));
    }
    if come[rank - 1].is_some() {
        return Some(format!("two processes came as rank {rank}: each must have a rank of its own"));
    }
    if other.config != own.config {
        return Some(format!(
            "rank {rank} runs another configuration than rank 0: give all the same command line"
        ));
    }
    None
}

/// Comes to rank 0; gives the connection and where every rank listens for data.
///
/// # Errors
/// Rank 0 is not there in time, or refuses.
pub fn join(start: &Start, own: &Hello, timeout: Duration) -> Result<(TcpStream, Vec<String>), DeviceError> {
    let until = Instant::now() + timeout;
    let port = start.port.unwrap_or(0);
    let stream = loop {
        match connect(&start.master, port) {
            Ok(stream) => break stream,
            Err(e) if Instant::now() >= until => {
                return Err(failed(format!(
                    "rank {}: rank 0 of {} was not at {}:{port} within {} s ({e}; --rendezvous_timeout)",
                    own.rank,
                    own.size,
                    start.master,
                    timeout.as_secs_f64()
                )));
            }
            Err(_) => std::thread::sleep(LOOK),
        }
    };
    let io = |e: io::Error| {
        failed(format!(
            "rank {}: rank 0 did not answer ({e}): it has ended, or waited in vain for another rank",
            own.rank
        ))
    };
    stream.set_nodelay(true).map_err(io)?;
    write_line(&stream, own).map_err(io)?;
    // Rank 0 answers when all are there.
    stream.set_read_timeout(Some(timeout + LINE)).map_err(io)?;
    let answer = read_line(&stream).map_err(io)?;
    stream.set_read_timeout(None).map_err(io)?;
    match answer {
        Answer::Welcome { data } => Ok((stream, data)),
        Answer::Refused { why } => Err(failed(why)),
    }
}

fn connect(host: &str, port: u16) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "no address");
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, LINE) {
            Ok(stream) => return Ok(stream),
            Err(e) => last = e,
        }
    }
    Err(last)
}

/// Connects every rank with every other: each calls those below it and is called by those above it.
///
/// # Errors
/// A rank that is not there.
pub fn mesh(
    listener: &TcpListener,
    data: &[String],
    rank: usize,
    timeout: Duration,
) -> Result<Vec<Option<TcpStream>>, DeviceError> {
    let until = Instant::now() + timeout;
    let broke = |other: usize, e: io::Error| failed(format!("rank {rank} cannot reach rank {other} ({e})"));
    let mut peers: Vec<Option<TcpStream>> = data.iter().map(|_| None).collect();
    for (other, address) in data.iter().enumerate().take(rank) {
        let mut stream = TcpStream::connect(address).map_err(|e| broke(other, e))?;
        stream.write_all(&(rank as u64).to_le_bytes()).map_err(|e| broke(other, e))?;
        peers[other] = Some(stream);
    }
    listener.set_nonblocking(true).map_err(|e| broke(rank, e))?;
    while let Some(missing) = (rank + 1..data.len()).find(|r| peers[*r].is_none()) {
        match listener.accept() {
            Ok((mut stream, _)) => {
                let mut word = [0; 8];
                let told = stream
                    .set_nonblocking(false)
                    .and_then(|()| stream.set_read_timeout(Some(LINE)))
                    .and_then(|()| stream.read_exact(&mut word))
                    .and_then(|()| stream.set_read_timeout(None));
                let other = usize::try_from(u64::from_le_bytes(word)).unwrap_or(usize::MAX);
                match peers.get_mut(other).filter(|p| told.is_ok() && p.is_none() && other > rank) {
                    Some(place) => *place = Some(stream),
                    None => drop(stream.shutdown(Shutdown::Both)),
                }
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock && Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(e) => return Err(broke(missing, e)),
        }
    }
    Ok(peers)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(rank: usize, size: usize) -> Hello {
        Hello { version: "1".into(), rank, size, config: 7, data_port: 1 }
    }
    fn start(port: u16) -> Start {
        Start {
            size: 3,
            rank: 0,
            local_rank: 0,
            master: "127.0.0.1".into(),
            port: Some(port),
            by: "WORLD_SIZE",
        }
    }

    #[test]
    fn missing_ranks_are_named() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let s = start(listener.local_addr().unwrap().port());
        let there = s.clone();
        let other = std::thread::spawn(move || {
            join(&there, &hello(2, 4), Duration::from_millis(700)).map(|_| ()).unwrap_err().to_string()
        });
        let (mut children, interrupt) = (Children::default(), AtomicBool::new(false));
        let timeout = Duration::from_millis(300);
        let e = gather(&listener, &hello(0, 4), &s, timeout, &mut children, &interrupt);
        let e = e.unwrap_err().to_string();
        assert!(e.contains("ranks 1 and 3 of 4 did not come") && e.contains("0.3 s"), "{e}");
        drop(listener);
        assert!(other.join().unwrap().contains("rank 0 did not answer"), "the other learns it too");
    }

    #[test]
    fn rank_0_is_missed_by_the_others() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let e = join(&start(port), &hello(1, 3), Duration::from_millis(100)).unwrap_err().to_string();
        assert!(e.contains("rank 0 of 3 was not at 127.0.0.1:") && e.contains("0.1 s"), "{e}");
    }

    #[test]
    fn ranks_that_do_not_fit_are_refused() {
        let own = hello(0, 3);
        let none = [None, None];
        assert_eq!(unfit(&own, &hello(2, 3), &none), None);
        for (other, part) in [
            (Hello { version: "2".into(), ..hello(1, 3) }, "is mbperf 2"),
            (hello(1, 4), "rank 1 of 4"),
            (hello(0, 3), "as rank 0"),
            (Hello { config: 8, ..hello(1, 3) }, "another configuration"),
        ] {
            assert!(unfit(&own, &other, &none).unwrap().contains(part), "{part}");
        }
        assert_eq!(list(&[4]), "rank 4");
        assert_eq!(list(&(1..100).collect::<Vec<_>>()), "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 91 more");
    }
}
