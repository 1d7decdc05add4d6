// Holds the namespaces of a pod: ends when it is told to, and reaps processes whose parent has ended.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	received := make(chan os.Signal, 8)
	signal.Notify(received, syscall.SIGINT, syscall.SIGTERM, syscall.SIGCHLD)
	for which := range received {
		if which != syscall.SIGCHLD {
			return
		}
		for {
			ended, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
			if ended <= 0 || err != nil {
				break
			}
		}
	}
}
