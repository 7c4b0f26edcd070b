# Kills all processes of this user but itself, again and again.
exec perl -MIO::Select -e '
    $| = 1;
    my $stdin = IO::Select->new(\*STDIN);
    print "under way\n";
    kill "KILL", -1 until $stdin->can_read(0.001);
'
