# Listens at ports as soon as they are free, and answers nothing. Arguments: ADDRESS:PORT …
for socket in /proc/[0-9]*/root/tmp/agent.sock; do
    [ -e "$socket" ] && echo "reached $socket"
done
perl -MIO::Select -MIO::Socket::INET -e '
    $| = 1;
    my $stdin = IO::Select->new(\*STDIN);
    my (%taken, $end);
    print "under way\n";
    until ($end) {
        for (grep { !$taken{$_} } @ARGV) {
            $taken{$_} = IO::Socket::INET->new(LocalAddr => $_, Listen => 1, ReuseAddr => 1);
            print "took $_\n" if $taken{$_};
        }
        $end = $stdin->can_read(0.01) && !sysread STDIN, my $words, 1;
    }
' "$@"
